"""A recorded answer that the model is forced to write."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor


class ForcedText(LogitsProcessor):
    """Forces a text, `(length,)` ids of prompt and answer: its token scores highest at each place.

    The other tokens keep their scores: if they were forbidden, transformers' prompt look-up, which
    calls the logits processors before it drafts, would learn the text from them.

    The tokens that the model would have chosen by itself are recorded. They show whether passes
    over drafts compute the same as plain decoding; the forced text does not.
    """

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids
        # The last call for a position counts: a rejected draft causes another one.
        self._best: dict[int, torch.Tensor] = {}

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        position = min(input_ids.shape[1], len(self.ids) - 1)
        if input_ids.shape[1] == position:
            self._best[position] = torch.argmax(scores[0])
        forced = scores.clone()
        forced[:, self.ids[position]] = torch.finfo(scores.dtype).max
        return forced

    def unforced(self) -> list[int]:
        """The tokens that the model would have chosen by itself."""
        return [int(self._best[position]) for position in sorted(self._best)]
