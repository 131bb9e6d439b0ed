"""Drafts from what a client expects to be answered."""

from __future__ import annotations

import numpy as np

from ...drafting.drafter import Drafter
from ...drafting.observation import Observation
from ...drafting.reference_copy import ReferenceCopy
from ...drafting.tree import DraftTree


class Prediction(Drafter):
    """Copies from the prediction of a request, and drafts nothing for a request without one. It
    outlives them all, so that a blend keeps what became of its estimates.

    Attributes:
        ids (`np.ndarray`, integers of shape `(n,)`, *optional*): The prediction of the next call.
    """

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

    def observe(self, observation: Observation) -> None:
        if self._copy is not None:
            self._copy.observe(observation)
