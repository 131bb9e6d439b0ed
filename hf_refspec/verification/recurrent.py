"""The best path of a draft, for caches that hold a running state (Mamba 2, linear attention).

A running state cannot be cropped. The state from before the draft is restored, and the accepted
tokens are run again together with the next draft, so that a rejection costs no pass of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..drafting.tree import DraftTree
from .cache import find_cache, restore, snapshot
from .chain import SequentialVerifier
from .static_cache import has_static_layers
from .verifier import TokenSequence


class RecurrentVerifier(SequentialVerifier):
    """One row of a model with a running state."""

    reruns = True

    @classmethod
    def supports(cls, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
        # A cache of the model's own kind may hold a state without saying so.
        cache = find_cache(model_kwargs)
        return cache is not None and not has_static_layers(cache)

    def _run(self, rows: Sequence[TokenSequence], drafts: Sequence[DraftTree]) -> torch.Tensor:
        self._before = snapshot(self.cache) if len(drafts[0]) else []
        return super()._run(rows, drafts)

    def keep(self, paths: Sequence[list[int] | None]) -> None:
        if not self._drafts:
            return
        [path], [draft] = paths, self._drafts
        if path is not None and len(path) == len(draft):
            self.cached = [self.cached[0] + self._pending[0] + len(path)]
        elif len(draft):
            restore(self.cache, self._before)  # nothing of the pass is left, nothing is cached
        self._drafts = ()

    def _take_back(self) -> None:
        if self._before:
            restore(self.cache, self._before)
