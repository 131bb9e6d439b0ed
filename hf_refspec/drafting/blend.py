"""The blend of several drafters, `a | b`, which merges their trees."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from torch import nn

from .auto import sources_of
from .calibration import PRIOR_EXPONENT, Calibration
from .contract import NO_PATH, Call, Drafter, LookUp, Observation, PathDrafter, checked_draft
from .stats import SourceStats
from .tree import DraftTree, after_path, merged

# The most nodes at which other sources continue a draft, the least probability of such a node, and
# the most nodes that each source may add there. More of either takes more time at each draft.
_CONTINUED_NODES = 4
_LEAST_CONTINUED_PROB = 0.1
_ADDED_NODES = 16


class _Draft(NamedTuple):
    """The draft of one source after another's path, or after the text."""

    source: int  # its number
    path: np.ndarray  # int64 of shape (n,), tokens
    tree: DraftTree


class Blend(Drafter):
    """Drafts from several sources at once: their trees merged, the most probable nodes kept.

    `a | b | c` is the same as `Blend([a, b, c])`.

    Args:
        drafters (sequence of [`Drafter`], [`Datastore`], `CandidateGenerator` or `"auto"`): The
            sources; a blend among them, and `"auto"`, counts as its own sources, and a datastore as
            `DatastoreDrafts(store)`. A source that runs a model ([`DraftModel`]) drafts last: it
            continues where the others are no longer sure, and they continue what it drafted.

    Raises:
        ValueError: If there are none, or the same one twice.
        TypeError: If something else is among them.
    """

    _of_a_call = (
        *Drafter._of_a_call,
        *("_vocab_size", "_drafts", "_costly", "_cheap", "_pruners"),
    )

    def __init__(self, drafters: Sequence[Any]) -> None:
        role = "a source of a blend"
        sources = [source for drafter in drafters for source in sources_of(drafter, role)]
        if not sources:
            raise ValueError("drafters is empty; give at least one")
        if len(set(map(id, sources))) < len(sources):
            raise ValueError("drafters has the same drafter twice; make another one")
        self._sources = sources
        self.observed_top_k = max(source.observed_top_k for source in sources)
        outputs: dict[str, Any] = {}
        for source in sources:
            for name, wanted in source.observed_outputs.items():
                outputs[name] = wanted if outputs.get(name, wanted) == wanted else True
        self.observed_outputs = outputs
        costly = [isinstance(source, PathDrafter) and source.costly for source in sources]
        if any(costly):
            # A model's estimates are sounder than look-up's: the prior is for the latter alone.
            self._calibrations = [Calibration(0.0 if runs else PRIOR_EXPONENT) for runs in costly]
            self.calibration = Calibration()
        else:
            self._calibrations = [Calibration() for _ in sources]

    @property
    def sources(self) -> list[Drafter]:
        return self._sources

    def check(self, vocab_size: int, processors: Sequence[Any] | None = None) -> None:
        for source in self._sources:
            source.check(vocab_size, processors)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self._sources))

    def fork(self) -> Blend:
        shared = {id(each): each for each in (self.calibration, self._calibrations)}
        forks = {id(source): source.fork() for source in self._sources}
        return copy.deepcopy(self, shared | forks)

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.stats.sources = [SourceStats(type(drafter).__name__) for drafter in self._sources]
        self._drafts: list[_Draft] = []
        for drafter in self._sources:
            drafter.begin(prompt_ids, vocab_size)
        # By their numbers; a source may prune in one call and not in another.
        path_drafters = {
            number: source
            for number, source in enumerate(self._sources)
            if isinstance(source, PathDrafter)
        }
        self._costly = {i: source for i, source in path_drafters.items() if source.costly}
        self._cheap = {i: source for i, source in path_drafters.items() if not source.costly}
        self._pruners = {i: source for i, source in path_drafters.items() if source.prunes}

    def draft(self, budget: int, call: Call) -> DraftTree:
        estimates = self._estimates(budget, call)
        if call.chain:
            return merged(estimates, sum(map(len, estimates))).best_chain().truncated(budget)
        return merged(estimates, budget)

    def observe(self, observation: Observation) -> None:
        tokens = observation.tokens
        # Which of them each source had drafted.
        owners: list[int | None] = [None] * len(tokens)
        for i, source in enumerate(self.stats.sources):
            foreseen: set[int] = set()
            drafted = 0
            for draft in self._drafts:
                if draft.source != i:
                    continue
                depth = len(draft.path)
                drafted += len(draft.tree)
                if depth == 0 or (depth < len(tokens) and (draft.path == tokens[:depth]).all()):
                    reached = self._calibrations[i].record(draft.tree, tokens[depth:])
                    foreseen |= {*range(depth, min(depth + reached, len(tokens) - 1))}
            first = [place for place in foreseen if owners[place] is None]
            source.add(drafted=drafted, accepted=len(foreseen), first=len(first))
            for place in first:
                owners[place] = i
        self.stats.add(owners=owners)
        self._drafts = []
        for drafter in self._sources:
            drafter.observe(observation)

    def end(self) -> None:
        for drafter in self._sources:
            drafter.end()

    def _estimates(self, budget: int, call: Call) -> list[DraftTree]:
        """Each source's draft, with corrected estimates: first the cheap sources', then the costly
        ones', which know the earlier drafts and whose paths the cheap ones continue."""
        self._drafts = []
        estimates = [DraftTree.empty()]
        for i in sorted(range(len(self._sources)), key=self._costly.__contains__):
            source_call = call
            if i in self._costly:
                source_call = dataclasses.replace(call, known=merged(estimates, budget))
            tree = checked_draft(self._sources[i], budget, source_call, self._vocab_size)
            estimates.append(self._estimate(i, tree))
            if i in self._costly:
                tree = estimates[-1]
                leaves = np.setdiff1d(np.arange(len(tree)), tree.parents)
                for node in _best_nodes(tree, leaves):
                    estimates += self._continued(tree, node, self._cheap, budget, call)
        if self._pruners:
            tree = merged(estimates, budget)
            nodes = np.arange(len(tree))
            leaves = np.setdiff1d(nodes, tree.parents)
            trees = {draft.source: draft.tree for draft in self._drafts if len(draft.path) == 0}
            for node in dict.fromkeys(_best_nodes(tree, leaves) + _best_nodes(tree, nodes)):
                path = tree.path(node).tolist()
                # A pruner's own tree may continue this path already.
                pruners = {
                    i: source
                    for i, source in self._pruners.items()
                    if len(trees[i].along(path)) < len(path)
                }
                estimates += self._continued(tree, node, pruners, budget, call)
        return estimates

    def _estimate(self, source: int, tree: DraftTree, path: np.ndarray = NO_PATH) -> DraftTree:
        """A source's corrected tree after a path, without nodes that other sources exclude."""
        for i, pruner in self._pruners.items():
            if i != source:
                tree = pruner.prune(tree, path)
        self._drafts.append(_Draft(source, path, tree))
        return self._calibrations[source].calibrated(tree)

    def _continued(
        self,
        tree: DraftTree,
        node: int,
        sources: Mapping[int, PathDrafter],
        budget: int,
        call: Call,
    ) -> list[DraftTree]:
        """The estimates of some sources for what follows a node of a tree."""
        path = tree.path(node)
        continued = []
        for i, source in sources.items():
            drafted = source.continue_path(path, min(budget, _ADDED_NODES), call)
            estimate = self._estimate(i, drafted.checked(self._vocab_size), path)
            continued.append(after_path(path, float(tree.probs[node]), estimate))
        return continued


def _best_nodes(tree: DraftTree, nodes: np.ndarray) -> list[int]:
    """The most probable of some nodes (int64, `(n,)`) that are probable enough to be continued."""
    nodes = nodes[np.argsort(-tree.probs[nodes], kind="stable")][:_CONTINUED_NODES]
    best: list[int] = nodes[tree.probs[nodes] >= _LEAST_CONTINUED_PROB].tolist()
    return best


def blend_of_model(
    drafter: Drafter, model: nn.Module, key: Hashable, new_source: Callable[[], Drafter]
) -> Blend:
    """The blend of a drafter with a source of a model. The drafter keeps one for each model, until
    the `key` changes: a blend learns when its sources pay."""
    blends = vars(drafter).setdefault("_blends", WeakKeyDictionary())
    kept = blends.get(model)
    if kept is None or kept[0] != key:
        kept = blends[model] = key, Blend([drafter, new_source()])
    blend: Blend = kept[1]
    return blend


def as_drafter(value: Any, role: str = "`candidate_generator`") -> Drafter:
    """The drafter for a call's `candidate_generator`: itself if it is one, else of its
    [`sources_of`]. Raises a TypeError for a drafter whose methods do not take the call."""
    if isinstance(value, Drafter):
        for source in value.sources:
            _check_signatures(source)
        return value
    sources = sources_of(value, role)
    return sources[0] if len(sources) == 1 else Blend(sources)


def _check_signatures(drafter: Drafter) -> None:
    """Refuses a drafter that was written before `draft` received the call."""
    for contract, name in ((Drafter, "draft"), (PathDrafter, "continue_path"), (LookUp, "look_up")):
        if isinstance(drafter, contract):
            _, *arguments = inspect.signature(getattr(contract, name)).parameters
            given = inspect.signature(getattr(drafter, name))
            try:
                given.bind(*arguments)
            except TypeError:
                raise TypeError(
                    f"{type(drafter).__name__}.{name}{given} must be {name}"
                    f"({', '.join(arguments)}): `call` has the options of the call"
                ) from None
