"""Forward passes without drafts, for models that cannot take several tokens behind a cache.

Speculative retrieval runs on them as well: whenever more than one token is pending, everything is
run again, as a call of its own would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..drafting.tree import DraftTree
from .cache import find_cache, fresh_kwargs
from .chain import SequentialVerifier
from .verifier import TokenSequence


class PlainVerifier(SequentialVerifier):
    """One row, one token a pass."""

    name = "plain"
    continues = False

    @classmethod
    def supports(cls, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
        return True

    def forward(self, rows: Sequence[TokenSequence], drafts: Sequence[DraftTree]) -> torch.Tensor:
        [row] = rows
        if self.cache is None:  # the state is in no cache that could be kept
            outputs = self.model(input_ids=row.ids, use_cache=False, return_dict=True)
            return outputs.logits[:, -1:]
        if self.cached and len(row) - self.cached[0] > 1:
            self.begin_again(row)
        return super().forward(rows, drafts)

    def begin_again(self, row: TokenSequence) -> None:
        """Forgets the cache: the next pass is a prefill of the row as it is now."""
        if self.cache is not None:
            mask = torch.ones_like(row.ids)
            self.model_kwargs = fresh_kwargs(self.model, self.model_kwargs, mask)
            self.cache, self.cached = find_cache(self.model_kwargs), []

    def _keep(self, paths: Sequence[list[int] | None]) -> None:
        """There is never a draft."""
