"""Sources of drafts that a request brings along."""

from __future__ import annotations

import numpy as np

from ...drafting.observation import Observation
from ...drafting.source import NO_PATH, Source
from ...drafting.tree import DraftTree
from .grammars import GrammarBudget


class RequestSource(Source):
    """Drafts what `source` does, which is the next call's own. It serves all requests, so that a
    blend keeps what it has learned of its estimates."""

    def __init__(self) -> None:
        self.source = Source()  # which drafts nothing

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self.prunes, self.source.call = self.source.prunes, self.call
        self.source.begin(prompt_ids, vocab_size)

    def continue_path(self, path: np.ndarray, budget: int) -> DraftTree:
        return self.source.continue_path(path, budget)

    def prune(self, tree: DraftTree, path: np.ndarray = NO_PATH) -> DraftTree:
        return self.source.prune(tree, path)

    def observe(self, observation: Observation) -> None:
        self.source.observe(observation)

    def end(self) -> None:
        self.source.end()
        self.source, self.prunes = Source(), False


class Prediction(RequestSource):
    """Copies from the answer that a client expects."""


class Grammar(RequestSource):
    """Drafts what a schema or the form of a call forces, until the request's `budget` is spent."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = GrammarBudget()

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
