"""Drafts from the answer that a client expects."""

from __future__ import annotations

import numpy as np

from ...drafting.drafter import Drafter
from ...drafting.observation import Observation
from ...drafting.reference_copy import ReferenceCopy
from ...drafting.tree import DraftTree


class Prediction(Drafter):
    """Copies from `ids`, the prediction of the next call, if there is one. It serves all requests,
    so that a blend keeps what it has learned of its estimates."""

    def __init__(self) -> None:
        self.ids: np.ndarray | None = None
        self._copy: ReferenceCopy | None = None

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._copy = None
        if self.ids is not None:
            self._copy = ReferenceCopy(self.ids, include_prompt=False)
            self._copy.begin(prompt_ids, vocab_size)

    def draft(self, budget: int) -> DraftTree:
        return DraftTree.empty() if self._copy is None else self._copy.draft(budget)

    def draft_chain(self, budget: int) -> DraftTree:
        return DraftTree.empty() if self._copy is None else self._copy.draft_chain(budget)

    def continue_path(self, path: np.ndarray, budget: int) -> DraftTree:
        return DraftTree.empty() if self._copy is None else self._copy.continue_path(path, budget)

    def observe(self, observation: Observation) -> None:
        if self._copy is not None:
            self._copy.observe(observation)
