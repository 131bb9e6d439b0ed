"""Drafters inside transformers' own assisted decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.generation import CandidateGenerator

from .observation import Observation

# transformers' protocol names no vocabulary; this one holds every id that an int32 can.
ANY_VOCABULARY = 2**31 - 1


class AssistedDrafter(CandidateGenerator):
    """Serves transformers' `CandidateGenerator` protocol with the chains that a [`Drafter`] drafts.

    Attributes:
        assisted_draft_tokens (`int`): The longest chain: the protocol sets no budget (10, as for
            its prompt look-up).
    """

    assisted_draft_tokens: int = 10
    _assisted_ids: np.ndarray | None = None  # the text so far; `None` where a call began otherwise

    def get_candidates(
        self: Any, input_ids: torch.LongTensor, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """transformers' protocol: `input_ids` with a chain of draft tokens behind them.

        Ids that continue those of the last call are the same text, others begin a new one.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, n)`): Prompt and output so far.

        Returns:
            The candidate ids, of shape `(1, n + m)`, and `None`: there are no draft logits.

        Raises:
            ValueError: if there is more than one row.
            RuntimeError: if another call is using this drafter.
        """
        if input_ids.shape[0] != 1:
            raise ValueError(f"input_ids must have one row, but has {input_ids.shape[0]}")
        from .calls import owned
        from .drafter import checked_draft

        with owned(self):
            self._follow(input_ids[0].numpy(force=True).copy())
            chain = checked_draft(self, self.assisted_draft_tokens, ANY_VOCABULARY)
        draft_ids = torch.from_numpy(chain.tokens).to(input_ids.device)
        return torch.cat((input_ids, draft_ids[None]), dim=1), None

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int
    ) -> None:
        """transformers' protocol: nothing to do, `get_candidates` sees what was accepted."""

    def _follow(self: Any, ids: np.ndarray) -> None:
        """Observes what is new in `ids`, or begins another text."""
        seen = self._assisted_ids
        if seen is not None and np.array_equal(ids[: len(seen)], seen):
            if len(ids) > len(seen):
                self.observe(Observation(ids[len(seen) :]))
        else:
            from .drafter import Call

            if seen is not None:
                self.end()
            self.call = Call(chain=True)
            self.begin(ids, ANY_VOCABULARY)
        self._assisted_ids = ids
