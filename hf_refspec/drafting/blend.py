"""One draft tree out of several sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from transformers.generation import CandidateGenerator

from .calibration import PRIOR_EXPONENT, Calibration
from .candidates import as_source, shown_with_remedy
from .drafter import Drafter, checked_draft
from .observation import Observation
from .source import NO_PATH, Source
from .stats import SourceStats
from .tree import DraftTree, merged

if TYPE_CHECKING:
    from ..store.datastore import Datastore

# The most places at which others continue a draft, their least probability, and the most nodes that
# each may add. More nodes or places take more time at each draft.
_PLACES, _LEAST_PROB, _NODES = 4, 0.1, 16


class _Draft(NamedTuple):
    """What a source drafted behind another's path, or behind the text."""

    source: int
    path: np.ndarray
    tree: DraftTree


class Blend(Drafter):
    """Drafts from several sources at once: their trees merged, the most probable nodes kept.

    `a | b | c` is the same as `Blend([a, b, c])`.

    Args:
        drafters (sequence of [`Drafter`], [`Datastore`], `CandidateGenerator` or `"auto"`): The
            sources. A blend among them, or `"auto"`, counts as its sources, and a datastore as
            `DatastoreDrafts(store)`. A source that runs a model ([`DraftModel`]) drafts last: it
            goes on where the others are no longer sure, and they go on from what it drafted.

    Raises:
        TypeError: if something else is among them.
        ValueError: if there are none, or one is there twice.
    """

    def __init__(self, drafters: Sequence[Drafter | CandidateGenerator | Datastore]) -> None:
        self._sources: list[Drafter] = []
        for given in drafters:
            drafter = as_source(given)
            if drafter is None:
                shown = shown_with_remedy(given)
                raise TypeError(f'drafters must be drafters or "auto", but has {shown}')
            self._sources += drafter.sources
        if not self.sources:
            raise ValueError("drafters is empty; give at least one")
        if len(set(map(id, self.sources))) < len(self.sources):
            raise ValueError("drafters has the same drafter twice; make another one")
        self.observed_top_k = max(drafter.observed_top_k for drafter in self.sources)
        self.prompt_fraction = max(drafter.prompt_fraction for drafter in self.sources)
        self._calibrations = [Calibration() for _ in self.sources]
        if costly := self._that("costly"):
            # A model's estimates are sounder than look-up's: the prior is for the latter alone.
            priors = (0.0 if i in costly else PRIOR_EXPONENT for i in range(len(self.sources)))
            self._calibrations = [Calibration(prior) for prior in priors]
            self.calibration = Calibration()

    def _that(self, trait: str, has: bool = True) -> dict[int, Source]:
        """The sources that have (or lack) a trait of [`Source`] now, by their numbers."""
        sources = {i: each for i, each in enumerate(self.sources) if isinstance(each, Source)}
        return {i: each for i, each in sources.items() if getattr(each, trait) == has}

    @property
    def sources(self) -> list[Drafter]:
        return self._sources

    def check(self, vocab_size: int, processors: Sequence[Any] | None = None) -> None:
        for source in self.sources:
            source.check(vocab_size, processors)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.sources))

    def fork(self) -> Blend:
        fork = Blend([drafter.fork() for drafter in self.sources])
        fork.calibration, fork._calibrations = self.calibration, self._calibrations
        return fork

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.stats.sources = [SourceStats(type(drafter).__name__) for drafter in self.sources]
        self._drafts: list[_Draft] = []
        for drafter in self.sources:
            drafter.call = self.call
            drafter.begin(prompt_ids, vocab_size)
        self._costly, self._pruners = self._that("costly"), self._that("prunes")

    def draft(self, budget: int) -> DraftTree:
        estimates = self._estimates(budget)
        if self.call.chain:
            return merged(estimates, sum(map(len, estimates))).best_chain().truncated(budget)
        return merged(estimates, budget)

    def observe(self, observation: Observation) -> None:
        if not observation.of_prompt:
            self._record(observation.tokens)
        for drafter in self.sources:
            if not observation.of_prompt or drafter.prompt_fraction > 0:
                drafter.observe(observation)

    def _record(self, tokens: np.ndarray) -> None:
        """Counts which emitted tokens each source had drafted, and corrects its estimates."""
        known: set[int] = set()  # accepted tokens that an earlier source had drafted
        for i, source in enumerate(self.stats.sources):
            foreseen: set[int] = set()
            for draft in self._drafts:
                if draft.source != i:
                    continue
                depth = len(draft.path)
                source.drafted += len(draft.tree)
                if depth == 0 or (depth < len(tokens) and (draft.path == tokens[:depth]).all()):
                    reached = self._calibrations[i].record(draft.tree, tokens[depth:])
                    foreseen |= {*range(depth, min(depth + reached, len(tokens) - 1))}
            source.accepted += len(foreseen)
            source.first += len(foreseen - known)
            known |= foreseen
        self._drafts = []

    def end(self) -> None:
        for drafter in self.sources:
            drafter.end()

    def _estimates(self, budget: int) -> list[DraftTree]:
        """Each source's draft, with corrected estimates: first those of the cheap sources, then
        those of the costly ones, which know the drafts before and whose paths the cheap ones
        continue."""
        self._drafts, estimates = [], [DraftTree.empty()]
        for i in sorted(range(len(self.sources)), key=self._costly.__contains__):
            if i in self._costly:
                self._costly[i].known = merged(estimates, budget)
            tree = checked_draft(self.sources[i], budget, self._vocab_size)
            estimates.append(self._estimate(i, tree))
            if i in self._costly:
                estimates += self._continued(estimates[-1], budget)
        if self._pruners:
            estimates += self._continued(merged(estimates, budget), budget, prunes=True)
        return estimates

    def _estimate(
        self, source: int, tree: DraftTree, path: np.ndarray = NO_PATH, prob: float = 1.0
    ) -> DraftTree:
        """A source's tree behind a path of that probability, with corrected estimates, and without
        the nodes that other sources know cannot follow."""
        for i, other in self._pruners.items():
            tree = tree if i == source else other.prune(tree, path)
        self._drafts.append(_Draft(source, path, tree))
        estimate, length = self._calibrations[source].calibrated(tree), len(path)
        if length == 0:
            return estimate
        # The path's nodes have probability 0, so that merging leaves the other tree's estimates.
        parents = np.where(estimate.parents < 0, length - 1, estimate.parents + length)
        return DraftTree(
            np.concatenate((path, estimate.tokens)),
            np.concatenate((np.arange(-1, length - 1), parents), dtype=np.int32),
            np.concatenate((np.zeros(length), prob * estimate.probs), dtype=np.float32),
        )

    def _continued(self, tree: DraftTree, budget: int, prunes: bool = False) -> list[DraftTree]:
        """What the cheap sources draft behind the best leaves of a tree; or, if it `prunes`, what
        the pruning sources draft there and behind its best other nodes."""
        every = np.arange(len(tree))
        places = _best_nodes(tree, np.setdiff1d(every, tree.parents))
        if prunes:
            places = [*dict.fromkeys(places + _best_nodes(tree, every))]
        own = {each.source: each.tree for each in self._drafts if len(each.path) == 0}
        sources = self._pruners if prunes else self._that("costly", False)
        continued = []
        for place in places:
            path = tree.path(place)
            for i, source in sources.items():
                if prunes and len(own[i].along(path.tolist())) == len(path):
                    continue  # its own tree goes on from there already
                more = source.continue_path(path, min(budget, _NODES)).checked(self._vocab_size)
                continued.append(self._estimate(i, more, path, float(tree.probs[place])))
        return continued


def _best_nodes(tree: DraftTree, nodes: np.ndarray) -> list[int]:
    """The most probable of these nodes, as far as they are probable enough to be continued."""
    nodes = nodes[np.argsort(-tree.probs[nodes], kind="stable")][:_PLACES]
    best: list[int] = nodes[tree.probs[nodes] >= _LEAST_PROB].tolist()
    return best
