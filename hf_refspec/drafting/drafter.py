"""The contract of everything that drafts (begin, draft, observe, fork, end), and what `|` makes of
several drafters: one that merges their trees."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .calibration import PRIOR_EXPONENT, Calibration
from .call_options import Call
from .observation import Observation
from .stats import DraftStats, SourceStats
from .tree import DraftTree, behind_path, merged

if TYPE_CHECKING:
    from typing_extensions import Self

NO_PATH = np.empty(0, dtype=np.int64)
# The most nodes at which other sources continue a draft, the least probability of such a node, and
# the most nodes that each source may add there. More of either takes more time at each draft.
_CONTINUED_NODES = 4
_LEAST_CONTINUED_PROB = 0.1
_ADDED_NODES = 16


class Drafter:
    """Drafts the tokens that may come next, for the target model to verify.

    One call of `generate` is `begin -> (draft -> observe)* -> end`. A subclass implements `draft`,
    and what it needs of the others. A drafter serves one call at a time; make one per thread. In a
    call with several rows each row has a `fork` of its own. It can be pickled and copied: a copy
    goes on with what it has learned, a pickle holds what it is, and nothing of the calls that it
    has served. A [`Blend`] has further uses for a [`PathDrafter`].

    Attributes:
        stats (`DraftStats`): Of the last call.
        call ([`Call`]): The options of the present call, set before it begins.
        calibration ([`Calibration`]): The outcomes of its estimates so far; its forks share it.
        decides_length (`bool`): Whether a call without `max_draft_tokens` verifies its drafts as
            they are, and not only what pays.
        observed_top_k (`int`): How many of the target's best next tokens it needs at each verified
            node; 0 if none.
        prompt_fraction (`float`): The most that an observation of the prompt may cost, as a
            fraction of the prefill; 0 if none is needed.
    """

    stats: DraftStats
    call: Call
    calibration: Calibration
    decides_length: bool = False
    observed_top_k: int = 0
    prompt_fraction: float = 0.0
    # Attributes that a call sets, and that no copy or pickle has. A subclass names its own as well.
    _of_a_call: tuple[str, ...] = ("_in_use", "call", "stats")

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Not in __init__: a subclass may forget to call it, and copies and pickles do not call it.
        drafter = super().__new__(cls)
        drafter.stats = DraftStats()
        drafter.call = Call()
        drafter.calibration = Calibration(PRIOR_EXPONENT)
        return drafter

    @property
    def sources(self) -> Sequence[Drafter]:
        """The drafters that draft in its calls: itself, or the sources of a [`Blend`]."""
        return [self]

    def check(self, vocab_size: int, processors: Sequence[Any] | None = None) -> None:
        """Checks a call before any work starts. Raises a ValueError if it would draft ids outside
        of the target's vocabulary; `processors` are the call's logits processors, where known."""

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        """Starts a call. If the kernels are not ready yet, it comes after the first token or later
        in the call, and `observe` then receives the tokens emitted before.

        Args:
            prompt_ids (`np.ndarray`, int64 of shape `(n,)`): The prompt.
            vocab_size (`int`): The target model's; drafts must stay below it.
        """

    def draft(self, budget: int) -> DraftTree:
        """Drafts what may follow the prompt and all observed tokens, at most `budget` nodes."""
        raise NotImplementedError(f"{type(self).__name__} must implement draft(budget)")

    def observe(self, observation: Observation) -> None:
        """Receives the result of a forward pass of the target model.

        Args:
            observation ([`Observation`]): The emitted tokens, the verified tree and what the target
                expected after each of its nodes; or, if `prompt_fraction` is above 0, what it
                expected inside the prompt.
        """

    def fork(self) -> Drafter:
        """Returns a drafter for another row of the same call, before `begin`.

        By default a deep copy that shares `calibration`, so that the outcomes of each row's drafts
        correct the estimates of all. Override it to share what is large, or what all rows add to.
        """
        fork = copy.deepcopy(self)
        fork.calibration = self.calibration
        return fork

    def source_texts(self) -> list[tuple[str, Sequence[Any]]]:
        """The texts that it copies from, for `stats.copied`: each source's name and its arrays,
        which no later call may change. Called before `end`; none by default."""
        return []

    def end(self) -> None:
        """Ends the call, also after an exception (one from `begin` too)."""

    def __or__(self, other: Any) -> Drafter:
        """`a | b` drafts from both, see [`Blend`]; one may be a datastore, or `"auto"`."""
        return Blend([self, other])

    def __ror__(self, other: Any) -> Drafter:
        return Blend([other, self])

    def __repr__(self) -> str:
        """Its arguments that differ from the defaults: numbers and strings alone."""
        arguments = []
        for parameter in inspect.signature(type(self).__init__).parameters.values():
            value = getattr(self, parameter.name, parameter.default)
            if isinstance(value, (int, float, str)) and value != parameter.default:
                arguments.append(f"{parameter.name}={value!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"

    def __getstate__(self) -> dict[str, Any]:
        return {k: value for k, value in vars(self).items() if k not in self._of_a_call}


def checked_draft(drafter: Drafter, budget: int, vocab_size: int) -> DraftTree:
    """A drafter's draft, as a single path where its call needs one. Raises a ValueError if the
    draft is not valid, or has more than `budget` nodes."""
    draft: Any = drafter.draft(budget)
    if not isinstance(draft, DraftTree) or len(draft) > budget:
        drafted = len(draft) if isinstance(draft, DraftTree) else repr(draft)
        raise ValueError(
            f"{type(drafter).__name__} was asked for a DraftTree of at most {budget} nodes, but "
            f"drafted {drafted}."
        )
    draft = draft.checked(vocab_size)
    return draft if not drafter.call.chain or draft.is_chain else draft.best_chain()


class PathDrafter(Drafter):
    """A drafter that can also draft behind a path of tokens, not only behind the text.

    Attributes:
        costly (`bool`): Whether it runs a model to draft, and so drafts after the others.
        prunes (`bool`): Whether it knows what cannot follow, and so prunes and continues the
            others' trees.
        known ([`DraftTree`]): The drafts of the other sources, for one that is costly.
    """

    costly: bool = False
    prunes: bool = False
    known: DraftTree = DraftTree.empty()

    def draft(self, budget: int) -> DraftTree:
        return self.continue_path(NO_PATH, budget)

    def continue_path(self, path: np.ndarray, budget: int) -> DraftTree:
        """Drafts what may follow the text and a path that another source has drafted, at most
        `budget` nodes. Called between `draft` and `observe`; drafts nothing by default.

        Args:
            path (`np.ndarray`, int64 of shape `(n,)`): The tokens of the path.
        """
        return DraftTree.empty()

    def prune(self, tree: DraftTree, path: np.ndarray = NO_PATH) -> DraftTree:
        """Removes the nodes that cannot follow the text and a path from another source's tree.
        Called between `draft` and `observe` if it `prunes`; removes nothing by default.

        Args:
            tree ([`DraftTree`]): The other source's draft behind the path.
            path (`np.ndarray`, int64 of shape `(n,)`, *optional*): The tokens of the path.
        """
        return tree


class _Draft(NamedTuple):
    """The draft of one source behind another's path, or behind the text."""

    source: int  # its number
    path: np.ndarray
    tree: DraftTree


class Blend(Drafter):
    """Drafts from several sources at once: their trees merged, the most probable nodes kept.

    `a | b | c` is the same as `Blend([a, b, c])`.

    Args:
        drafters (sequence of [`Drafter`], [`Datastore`], `CandidateGenerator` or `"auto"`): The
            sources; those of a blend among them count one by one. What is not a drafter yet becomes
            one when a call begins: `"auto"` its sources, and a datastore `DatastoreDrafts(store)`.
            A source that runs a model ([`DraftModel`]) drafts last: it goes on where the others are
            no longer sure, and they go on from what it drafted.

    Raises:
        ValueError: if there are none, or one is there twice. A call raises a TypeError if something
            else is among them.
    """

    def __init__(self, drafters: Sequence[Any]) -> None:
        self.set_sources(drafters)
        self._given = self._sources

    def set_sources(self, drafters: Sequence[Any]) -> None:
        """Drafts from these from now on, see the class."""
        sources: list[Any] = []
        for drafter in drafters:
            sources += drafter.sources if isinstance(drafter, Drafter) else [drafter]
        if not sources:
            raise ValueError("drafters is empty; give at least one")
        if len(set(map(id, sources))) < len(sources):
            raise ValueError("drafters has the same drafter twice; make another one")
        self._sources = sources
        ready = [source for source in sources if isinstance(source, Drafter)]
        self.observed_top_k = max((drafter.observed_top_k for drafter in ready), default=0)
        self.prompt_fraction = max((drafter.prompt_fraction for drafter in ready), default=0.0)
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
        for source in self.sources:
            source.check(vocab_size, processors)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.sources))

    def fork(self) -> Blend:
        fork = Blend([drafter.fork() for drafter in self.sources])
        fork.calibration = self.calibration
        fork._calibrations = self._calibrations
        return fork

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._given,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Blend:
        twin = Blend(copy.deepcopy(self._sources, memo))
        twin.calibration = copy.deepcopy(self.calibration, memo)
        twin._calibrations = copy.deepcopy(self._calibrations, memo)
        return twin

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.stats.sources = [SourceStats(type(drafter).__name__) for drafter in self.sources]
        self._drafts: list[_Draft] = []
        for drafter in self.sources:
            drafter.call = self.call
            drafter.begin(prompt_ids, vocab_size)
        # By their numbers; whether a source prunes may differ from call to call.
        path_drafters = {
            number: source
            for number, source in enumerate(self.sources)
            if isinstance(source, PathDrafter)
        }
        self._costly = {i: source for i, source in path_drafters.items() if source.costly}
        self._cheap = {i: source for i, source in path_drafters.items() if not source.costly}
        self._pruners = {i: source for i, source in path_drafters.items() if source.prunes}

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
        those of the costly ones, which know the earlier drafts and whose paths the cheap ones
        continue."""
        self._drafts = []
        estimates = [DraftTree.empty()]
        for i in sorted(range(len(self.sources)), key=self._costly.__contains__):
            if i in self._costly:
                self._costly[i].known = merged(estimates, budget)
            tree = checked_draft(self.sources[i], budget, self._vocab_size)
            estimates.append(self._estimate(i, tree))
            if i in self._costly:
                tree = estimates[-1]
                leaves = np.setdiff1d(np.arange(len(tree)), tree.parents)
                for node in _best_nodes(tree, leaves):
                    estimates += self._continued(tree, node, self._cheap, budget)
        if self._pruners:
            tree = merged(estimates, budget)
            nodes = np.arange(len(tree))
            leaves = np.setdiff1d(nodes, tree.parents)
            trees = {draft.source: draft.tree for draft in self._drafts if len(draft.path) == 0}
            for node in dict.fromkeys(_best_nodes(tree, leaves) + _best_nodes(tree, nodes)):
                path = tree.path(node).tolist()
                # A pruner's own tree may go on from there already.
                pruners = {
                    i: source
                    for i, source in self._pruners.items()
                    if len(trees[i].along(path)) < len(path)
                }
                estimates += self._continued(tree, node, pruners, budget)
        return estimates

    def _estimate(self, source: int, tree: DraftTree, path: np.ndarray = NO_PATH) -> DraftTree:
        """A source's tree behind a path, with corrected estimates, and without the nodes that other
        sources know cannot follow."""
        for i, pruner in self._pruners.items():
            if i != source:
                tree = pruner.prune(tree, path)
        self._drafts.append(_Draft(source, path, tree))
        return self._calibrations[source].calibrated(tree)

    def _continued(
        self, tree: DraftTree, node: int, sources: Mapping[int, PathDrafter], budget: int
    ) -> list[DraftTree]:
        """The estimates of some sources for what follows a node of a tree."""
        path = tree.path(node)
        continued = []
        for i, source in sources.items():
            drafted = source.continue_path(path, min(budget, _ADDED_NODES))
            estimate = self._estimate(i, drafted.checked(self._vocab_size), path)
            continued.append(behind_path(path, float(tree.probs[node]), estimate))
        return continued


def _best_nodes(tree: DraftTree, nodes: np.ndarray) -> list[int]:
    """The most probable of these nodes, as far as they are probable enough to be continued."""
    nodes = nodes[np.argsort(-tree.probs[nodes], kind="stable")][:_CONTINUED_NODES]
    best: list[int] = nodes[tree.probs[nodes] >= _LEAST_CONTINUED_PROB].tolist()
    return best
