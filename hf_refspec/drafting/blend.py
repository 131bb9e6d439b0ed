"""One draft tree out of several sources."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from ..index.draft_tree import merge_trees
from ..store.datastore import Datastore
from .calibration import Calibration
from .datastore_drafts import DatastoreDrafts
from .drafter import Drafter, valid_draft
from .observation import Observation
from .stats import SourceStats
from .tree import DraftTree


class Blend(Drafter):
    """Drafts from several sources at once: their trees merged, the most probable nodes kept.

    `a | b | c` is the same as `Blend([a, b, c])`.

    Args:
        drafters (sequence of [`Drafter`] or [`Datastore`]): The sources. Blends among them are
            taken apart, and a datastore is taken as `DatastoreDrafts(store)`.

    Raises:
        TypeError: if something else is among them.
        ValueError: if there is none, or one is there twice.
    """

    def __init__(self, drafters: Sequence[Drafter | Datastore]) -> None:
        self.drafters: list[Drafter] = []
        for drafter in drafters:
            if isinstance(drafter, Datastore):
                drafter = DatastoreDrafts(drafter)
            if not isinstance(drafter, Drafter):
                raise TypeError(f"drafters must be drafters of hf_refspec, but has {drafter!r}")
            self.drafters += drafter.drafters if isinstance(drafter, Blend) else [drafter]
        if not self.drafters:
            raise ValueError("drafters is empty; give at least one")
        if len(set(map(id, self.drafters))) < len(self.drafters):
            raise ValueError("drafters has the same drafter twice; make another one")
        self.observed_top_k = max(drafter.observed_top_k for drafter in self.drafters)
        self.prompt_fraction = max(drafter.prompt_fraction for drafter in self.drafters)
        self._calibrations = [Calibration() for _ in self.drafters]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.drafters))

    def fork(self) -> Blend:
        fork = Blend([drafter.fork() for drafter in self.drafters])
        fork.calibration = copy.deepcopy(self.calibration)
        fork._calibrations = copy.deepcopy(self._calibrations)
        return fork

    def check_vocabulary(self, vocab_size: int) -> None:
        for drafter in self.drafters:
            drafter.check_vocabulary(vocab_size)

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.stats.sources = [SourceStats(type(drafter).__name__) for drafter in self.drafters]
        self._trees: list[DraftTree] = []
        for drafter in self.drafters:
            drafter.sampling = self.sampling
            drafter.begin(prompt_ids, vocab_size)

    def draft(self, budget: int) -> DraftTree:
        return merged(self._estimates(budget, chain=False), budget)

    def draft_chain(self, budget: int) -> DraftTree:
        chains = self._estimates(budget, chain=True)
        return merged(chains, sum(map(len, chains))).best_chain().truncated(budget)

    def observe(self, observation: Observation) -> None:
        if not observation.of_prompt:
            self._record(observation.tokens)
        for drafter in self.drafters:
            if not observation.of_prompt or drafter.prompt_fraction > 0:
                drafter.observe(observation)

    def _record(self, tokens: np.ndarray) -> None:
        """Counts which emitted tokens each source had drafted, and corrects its estimates."""
        known = 0  # accepted tokens that an earlier source had drafted
        accepted = len(tokens) - 1
        for i, tree in enumerate(self._trees):
            foreseen = min(self._calibrations[i].record(tree, tokens), accepted)
            source = self.stats.sources[i]
            source.drafted += len(tree)
            source.accepted += foreseen
            source.first += max(foreseen - known, 0)
            known = max(known, foreseen)
        self._trees = []

    def end(self) -> None:
        for drafter in self.drafters:
            drafter.end()

    def _estimates(self, budget: int, chain: bool) -> list[DraftTree]:
        """What each source drafts, with corrected estimates."""
        limits = budget, self._vocab_size, chain
        self._trees = [valid_draft(drafter, *limits) for drafter in self.drafters]
        pairs = zip(self._calibrations, self._trees, strict=True)
        return [calibration.calibrated(tree) for calibration, tree in pairs]

    @contextmanager
    def _owned(self) -> Iterator[None]:
        with super()._owned(), ExitStack() as sources:
            for drafter in self.drafters:
                sources.enter_context(drafter._owned())
            yield


def merged(trees: Sequence[DraftTree], budget: int) -> DraftTree:
    """Merges draft trees by token path into one of at most `budget` nodes, see
    [`~index.draft_tree.merge_trees`]."""
    sizes = np.array([len(tree) for tree in trees])
    tokens = np.concatenate([tree.tokens for tree in trees])
    parents = np.concatenate([tree.parents for tree in trees])
    probs = np.concatenate([tree.probs for tree in trees])
    return DraftTree(*merge_trees(sizes, tokens, parents, probs, budget))


Drafter._blended = Blend
