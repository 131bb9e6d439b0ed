"""Sources of drafts that a request brings along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...drafting.observation import Observation
from ...drafting.source import NO_PATH, Source
from ...drafting.tree import DraftTree
from .grammars import GrammarBudget


class Prediction(Source):
    """Drafts by the request's own `source`: copies of the answer that its client expects. It serves
    one request after another, so that a blend keeps what it has learned of its estimates."""

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


class Grammar(Prediction):
    """As above, for the grammar of a request, as long as its `budget` allows."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = GrammarBudget()

    def continue_path(self, path: np.ndarray, budget: int) -> DraftTree:
        return self._within_budget(DraftTree.empty(), super().continue_path, path, budget)

    def prune(self, tree: DraftTree, path: np.ndarray = NO_PATH) -> DraftTree:
        return self._within_budget(tree, super().prune, tree, path)

    def observe(self, observation: Observation) -> None:
        self._within_budget(None, super().observe, observation)

    def _within_budget(self, otherwise: Any, call: Callable[..., Any], *arguments: Any) -> Any:
        if self.budget.ends_drafts():
            return otherwise
        with self.budget:
            return call(*arguments)
