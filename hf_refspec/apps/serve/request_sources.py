"""Sources of drafts that a request brings along."""

from __future__ import annotations

import numpy as np

from ...drafting.observation import Observation
from ...drafting.source import NO_PATH, Source
from ...drafting.tree import DraftTree
from .grammars import GrammarBudget


class _Nothing(Source):
    """Of requests that bring no source."""

    def draft(self, budget: int) -> DraftTree:
        return DraftTree.empty()


class Prediction(Source):
    """Drafts what the request's own `source` does: copies of the answer that its client expects.
    It serves all requests, so that a blend keeps what it has learned of its estimates."""

    def __init__(self) -> None:
        self.source: Source = _Nothing()

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self.prunes, self.source.call = self.source.prunes, self.call
        self.source.begin(prompt_ids, vocab_size)

    def draft(self, budget: int) -> DraftTree:
        return self.source.draft(budget)

    def continue_path(self, path: np.ndarray, budget: int) -> DraftTree:
        return self.source.continue_path(path, budget)

    def prune(self, tree: DraftTree, path: np.ndarray = NO_PATH) -> DraftTree:
        return self.source.prune(tree, path)

    def observe(self, observation: Observation) -> None:
        self.source.observe(observation)

    def end(self) -> None:
        self.source.end()
        self.source, self.prunes = _Nothing(), False


class Grammar(Prediction):
    """As above, what a schema or the form of a call forces, until the `budget` is spent."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = GrammarBudget()

    def draft(self, budget: int) -> DraftTree:
        return self.continue_path(NO_PATH, budget)

    def continue_path(self, path: np.ndarray, budget: int) -> DraftTree:
        if self.budget.is_spent():
            return DraftTree.empty()
        with self.budget:
            return super().continue_path(path, budget)

    def prune(self, tree: DraftTree, path: np.ndarray = NO_PATH) -> DraftTree:
        if self.budget.is_spent():
            return tree
        with self.budget:
            return super().prune(tree, path)

    def observe(self, observation: Observation) -> None:
        if not self.budget.is_spent():
            with self.budget:
                super().observe(observation)
