"""Speculative retrieval (RaLMSpec, Algorithm 1), for whatever generates and retrieves in turn.

A step generates with what a query found, until the next query. Plainly, every step waits for the
retriever. Here a request cache answers instead, so that several steps are speculated before one
batched search verifies them; at the first step that the truth would have made another, the text
goes back to before it and takes the truth. The text is the same as without speculation, provided
that the retriever finds the same for a query whatever is asked beside it, and that its best k are
the first k of any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, Protocol, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from ..index.retrieved import Retrieved
from ..retrieval.retriever import Retriever
from .checked_search import CheckedRetriever, RetrievalError, RunningSearch
from .gamma import Gamma, GammaByLag, PublishedGamma
from .os3 import LONGEST_STRIDE, SearchSeconds, StrideScheduler
from .prefetch import DEFAULT_PREFETCH, AutoPrefetch
from .request_cache import RequestCache
from .stats import RetrievalStats

__all__ = ["RetrievalError", "Speculation", "SpeculativeText", "generate_speculatively"]

# What the paper takes where the scheduler, or prefetching, is off.
_FIXED_STRIDE = 3
_NO_PREFETCH = 1
_PUBLISHED_MAX_GAMMA = 0.6
_DEFAULT_TIMEOUT = 60.0
# What the last request of each retriever has left, by what decides about it: which steps were right
# (`GammaByLag.remembered`), and what searches took (`SearchSeconds.samples`).
_Remembered: TypeAlias = tuple[np.ndarray | None, list[tuple[int, float]]]
_remembered: WeakKeyDictionary[Any, dict[tuple, _Remembered]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Speculation:
    """How retrieval is speculated. [`Speculation.published`] has the paper's settings.

    Args:
        prefetch (`int` or `"auto"`, *optional*, defaults to 20):
            P: how many passages of each search the request cache takes, 1 for the best alone.
            `"auto"` takes more or less of them by what they bring and cost.
        stride (`int` or `"os3"`, *optional*, defaults to `"os3"`):
            S: how many steps are speculated before they are verified. `"os3"` chooses what
            maximises the expected verified steps per second.
        asynchronous (`bool`, *optional*, defaults to `True`):
            A: whether speculation goes on while a verification runs.
        max_gamma (`float`, *optional*):
            The most that OS3 takes the chance of a right step to be, which it then estimates as the
            paper does (0.6 there). By default it is estimated otherwise, and may come close to 1:
            see [`~ralm.gamma.GammaByLag`].
        steps_ahead (`int`, *optional*):
            The most steps that an asynchronous verification is given company by; 1 in the paper. By
            default as many as pay.
        sketch (`bool`, *optional*, defaults to `True`):
            Whether guesses are also looked for in a sketch of the datastore, where there is one
            (see [`KnnDatastore.add_pq_index`]); not in the paper.
        window (`int`, *optional*, defaults to 5):
            The verifications from which OS3 estimates the chance of a right step; without
            `max_gamma` those before them count as well, less and less.
        timeout (`float`, *optional*, defaults to 60):
            The most seconds for one search. A search that takes longer, or fails, is tried once
            more. `None` for no limit.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has a value that it cannot have.
    """

    prefetch: int | Literal["auto"] = DEFAULT_PREFETCH
    stride: int | Literal["os3"] = "os3"
    asynchronous: bool = True
    max_gamma: float | None = None
    steps_ahead: int | None = None
    sketch: bool = True
    window: int = 5
    timeout: float | None = _DEFAULT_TIMEOUT

    def __post_init__(self) -> None:
        if self.prefetch != "auto":
            _check_count("prefetch", self.prefetch, ' or "auto"')
        if self.stride != "os3":
            _check_count("stride", self.stride, ' or "os3"')
        if not isinstance(self.asynchronous, bool):
            raise TypeError(f"asynchronous must be a bool, but is {self.asynchronous!r}")
        if not isinstance(self.sketch, bool):
            raise TypeError(f"sketch must be a bool, but is {self.sketch!r}")
        if self.max_gamma is not None and not 0 < self.max_gamma < 1:
            raise ValueError(
                f"max_gamma must lie between 0 and 1, or be None, but is {self.max_gamma}"
            )
        if self.steps_ahead is not None:
            _check_count("steps_ahead", self.steps_ahead, " or None")
        _check_count("window", self.window)
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout must be more than 0 seconds, or None, but is {self.timeout}")

    @classmethod
    def parse(cls, text: str | Speculation | None) -> Speculation | None:
        """What the option `speculation` means: the letters of what is on, as in the paper's tables.

        Args:
            text (`str`, `Speculation`, *optional*): Of `"p"` (prefetching), `"s"` (stride
                scheduler) and `"a"` (asynchronous verification), in any order; `""` speculates
                with a stride of 3 and nothing else. `None` is the baseline, which does not
                speculate.

        Raises:
            TypeError: If it is something else.
            ValueError: If it has other letters, or one twice.
        """
        return text if text is None or isinstance(text, Speculation) else cls(**_switched(text))

    @classmethod
    def published(cls, text: str) -> Speculation:
        """The same letters with the paper's own settings: gamma at most 0.6, one step beside a
        verification, and no sketch. Arguments and exceptions as of [`Speculation.parse`]."""
        return cls(**_switched(text), max_gamma=_PUBLISHED_MAX_GAMMA, steps_ahead=1, sketch=False)


def _switched(text: str) -> dict[str, Any]:
    if not isinstance(text, str):
        raise TypeError(
            'speculation must be a string like "psa", a Speculation, or None for none, but is '
            f"{text!r}"
        )
    if not set(text) <= set("psa") or len(set(text)) < len(text):
        raise ValueError(
            'speculation must be of the letters "p" (prefetching), "s" (stride scheduler) and "a" '
            f"(asynchronous verification), each at most once, but is {text!r}"
        )
    return {
        "prefetch": DEFAULT_PREFETCH if "p" in text else _NO_PREFETCH,
        "stride": "os3" if "s" in text else _FIXED_STRIDE,
        "asynchronous": "a" in text,
    }


def _check_count(name: str, value: Any, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int{otherwise}, but is {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, but is {value}")


class SpeculativeText(Protocol):
    """A text that is generated step by step, and can go back."""

    @property
    def finished(self) -> bool:
        """Whether it has ended, with the last step taken, speculated or not."""

    def query(self) -> Any:
        """What the next step retrieves with."""

    def step(self, found: Retrieved) -> Any:
        """Generates with what was found until the next retrieval.

        Returns:
            What `agrees`, `roll_back` and `commit` need to know of this step.
        """

    def agrees(self, step: Any, truth: Retrieved) -> bool:
        """Whether `truth` would have made the same step."""

    def roll_back(self, step: Any) -> None:
        """Goes back to before a step: it and all later ones have not happened."""

    def commit(self, steps: Sequence[Any]) -> None:
        """These steps, the first that were not committed yet, stay. Others may follow them that are
        still speculated."""


@dataclass(slots=True)
class _Speculated:
    """A step that awaits its verification.

    Attributes:
        query: What it retrieved with.
        step: What the text made of it.
        lag (`int`): How many steps lie between it and the last one whose search is in the cache,
            itself included; see [`Gamma`].
        cache_seconds (`float`): What asking the cache took.
    """

    query: Any
    step: Any
    lag: int
    cache_seconds: float


def _lags(steps: Sequence[_Speculated]) -> list[int]:
    return [each.lag for each in steps]


def generate_speculatively(
    text: SpeculativeText,
    retriever: Retriever,
    speculation: Speculation | None,
    k: int,
    neighbours: Callable[[np.ndarray], np.ndarray] | None = None,
    candidates: Callable[[Any, int], np.ndarray] | None = None,
    stats: RetrievalStats | None = None,
) -> RetrievalStats:
    """Generates until the text is finished and every step of it is verified.

    Args:
        text ([`SpeculativeText`]): What is generated. After a `RetrievalError` it is back where
            everything is verified.
        retriever ([`Retriever`]): What is searched, in another thread.
        speculation ([`Speculation`], *optional*): `None` for the baseline (RaLMSeq): a search
            before every step.
        k (`int`): How many passages a step needs.
        neighbours (callable, *optional*): Maps the ids that a search found (int64 of shape `(n,)`)
            to further ones that the request cache takes as well (spatial locality; section 5.3).
        candidates (callable, *optional*): Maps a query and `k` to ids (int64 of shape `(n,)`)
            that a speculated step chooses from beside those of the request cache.
        stats ([`RetrievalStats`], *optional*): Is cleared and filled.

    Returns:
        [`RetrievalStats`]: What was done; `stats`, if it was given.

    Raises:
        RetrievalError: If the retriever fails twice, or gives an answer that none can be.
    """
    stats = RetrievalStats() if stats is None else stats
    stats.clear()
    timeout = _DEFAULT_TIMEOUT if speculation is None else speculation.timeout
    with CheckedRetriever(retriever, k, timeout) as checked:
        if speculation is None:
            _retrieve_before_every_step(text, checked, k, stats)
        else:
            remembered = _remembered_of(retriever)
            beside = (neighbours is not None, candidates is not None)
            setting = (k, speculation.prefetch, speculation.asynchronous, *beside)
            estimates = _estimates(speculation, remembered.get(setting, (None, [])))
            _Request(text, checked, speculation, k, neighbours, candidates, stats, *estimates).run()
            gamma, search_seconds = estimates
            if isinstance(gamma, GammaByLag):
                remembered[setting] = (gamma.remembered(), search_seconds.samples)
    return stats


def _remembered_of(retriever: Retriever) -> dict[tuple, _Remembered]:
    try:
        return _remembered.setdefault(retriever, {})
    except TypeError:  # it has no hash, or cannot be referred to weakly
        return {}


def _estimates(speculation: Speculation, earlier: _Remembered) -> tuple[Gamma, SearchSeconds]:
    if speculation.max_gamma is not None:  # as published, nothing is known of earlier requests
        return PublishedGamma(speculation.window, speculation.max_gamma), SearchSeconds()
    right, searches = earlier
    return GammaByLag(speculation.window, right), SearchSeconds(searches)


def _retrieve_before_every_step(
    text: SpeculativeText, retriever: CheckedRetriever, k: int, stats: RetrievalStats
) -> None:
    """The baseline, RaLMSeq."""
    while not text.finished:
        truth, _ = _retrieve(text, retriever, k, stats)
        _take_truth(text, truth, stats)


def _retrieve(
    text: SpeculativeText, retriever: CheckedRetriever, count: int, stats: RetrievalStats
) -> tuple[Retrieved, float]:
    began = perf_counter()
    query = text.query()
    asked = perf_counter()
    stats.query_seconds += asked - began
    (truth,), seconds = _finish(retriever.begin([query], count), retriever, stats)
    return truth, seconds


def _finish(
    search: RunningSearch, retriever: CheckedRetriever, stats: RetrievalStats
) -> tuple[list[Retrieved], float]:
    began = perf_counter()
    truths, seconds = retriever.finish(search)
    stats.waiting_seconds += perf_counter() - began
    stats.verification_seconds += seconds
    stats.searches += 1
    stats.retrievals += len(truths)
    return truths, seconds


def _take_truth(text: SpeculativeText, truth: Retrieved, stats: RetrievalStats) -> None:
    began = perf_counter()
    text.commit([text.step(truth)])
    stats.model_seconds += perf_counter() - began
    stats.best_ids.append(int(truth.ids[0]))
    stats.speculation_was_right.append(False)


class _Request:
    """One request: a text, its cache, and the steps that await verification."""

    def __init__(
        self,
        text: SpeculativeText,
        retriever: CheckedRetriever,
        speculation: Speculation,
        k: int,
        neighbours: Callable[[np.ndarray], np.ndarray] | None,
        candidates: Callable[[Any, int], np.ndarray] | None,
        stats: RetrievalStats,
        gamma: Gamma,
        search_seconds: SearchSeconds,
    ) -> None:
        self._text = text
        self._retriever = retriever
        self._speculation = speculation
        self._k = k
        self._neighbours = neighbours
        self._candidates = candidates
        self._stats = stats
        self._cache = RequestCache(retriever)
        self._auto_prefetch = AutoPrefetch() if speculation.prefetch == "auto" else None
        self._gamma = gamma
        steps_ahead = speculation.steps_ahead if speculation.asynchronous else 0
        self._search_seconds = search_seconds
        self._scheduler = StrideScheduler(gamma, search_seconds, steps_ahead)
        # Steps of the text, in order: those that a search is looking into, and those after them.
        self._in_flight: list[_Speculated] = []
        self._pending: list[_Speculated] = []

    def run(self) -> None:
        """Generates the text."""
        try:
            self._begin()
            while self._pending or not self._text.finished:
                stride = self._stride()
                while len(self._pending) < stride and not self._text.finished:
                    self._speculate()
                self._verify()
        except RetrievalError:
            unverified = [*self._in_flight, *self._pending]
            if unverified:
                self._text.roll_back(unverified[0].step)
            raise

    def _begin(self) -> None:
        """The initial retrieval, which fills the cache."""
        if self._text.finished:
            return
        truth, seconds = _retrieve(self._text, self._retriever, self._count(), self._stats)
        self._search_seconds.record(1, seconds)
        self._fill_cache([truth])
        _take_truth(self._text, self._first(truth), self._stats)

    def _stride(self) -> int:
        stride = self._speculation.stride
        return self._scheduler.stride(len(self._pending)) if stride == "os3" else int(stride)

    def _count(self) -> int:
        """How many passages to search for."""
        prefetch = self._speculation.prefetch
        return max(self._k, int(self._auto_prefetch.count if self._auto_prefetch else prefetch))

    def _first(self, truth: Retrieved) -> Retrieved:
        """What a step needs of what was found."""
        return Retrieved(truth.ids[: self._k], truth.scores[: self._k])

    def _fill_cache(self, truths: list[Retrieved]) -> None:
        began = perf_counter()
        ids = np.concatenate([truth.ids for truth in truths])
        ranks = np.concatenate([np.arange(len(truth)) for truth in truths])
        if self._neighbours is not None:
            nearby = self._neighbours(ids)
            ids = np.concatenate([ids, nearby])
            ranks = np.concatenate([ranks, np.zeros(len(nearby), dtype=np.int64)])
        self._cache.add(ids, ranks)
        self._stats.cache_seconds += perf_counter() - began

    def _speculate(self, beside_search: bool = False) -> None:
        """One step with what the cache finds."""
        began = perf_counter()
        query = self._text.query()
        asked = perf_counter()
        others = None if self._candidates is None else self._candidates(query, self._k)
        found = self._cache.best(query, self._k, others)
        answered = perf_counter()
        step = self._text.step(found)
        stepped = perf_counter()
        lag = len(self._in_flight) + len(self._pending) + 1
        self._pending.append(_Speculated(query, step, lag, answered - asked))
        self._scheduler.record_step(stepped - began, beside_search)
        self._stats.speculated += 1
        self._stats.query_seconds += asked - began
        self._stats.cache_seconds += answered - asked
        self._stats.model_seconds += stepped - answered

    def _verify(self) -> None:
        """Searches for what the pending steps asked the cache for, and keeps those that it got
        right."""
        began = perf_counter()
        self._in_flight, self._pending = self._pending, []
        queries = [speculated.query for speculated in self._in_flight]
        search = self._retriever.begin(queries, self._count())
        self._stats.strides.append(len(queries))
        if self._speculation.asynchronous:
            self._go_on_beside(search)
        went_on = perf_counter() - began
        truths, search_seconds = _finish(search, self._retriever, self._stats)
        self._search_seconds.record(len(queries), search_seconds)
        self._record_ranks(truths)
        self._fill_cache(truths)
        truth = self._settle(truths)
        overhead = perf_counter() - began - max(went_on, search_seconds)
        self._scheduler.record_overhead(max(overhead, 0.0))
        if truth is not None:
            _take_truth(self._text, truth, self._stats)

    def _go_on_beside(self, search: RunningSearch) -> None:
        """Speculates while a search runs."""
        most = self._speculation.steps_ahead or LONGEST_STRIDE
        while len(self._pending) < most and not search.done and not self._text.finished:
            # As published, the one step is taken whatever it may bring.
            if self._speculation.steps_ahead is None and not self._scheduler.pays_to_go_on(
                _lags(self._in_flight), _lags(self._pending), perf_counter() - search.began
            ):
                break
            self._speculate(beside_search=True)

    def _settle(self, truths: list[Retrieved]) -> Retrieved | None:
        """Keeps the steps up to the first that is not as the truth would have made it.

        Returns:
            With what to do that one again; `None` if all were right.
        """
        truths = [self._first(truth) for truth in truths]
        steps = [speculated.step for speculated in self._in_flight]
        agreed = (self._text.agrees(*each) for each in zip(steps, truths, strict=True))
        right = next((i for i, same in enumerate(agreed) if not same), len(steps))
        all_right = right == len(steps)
        self._gamma.record(_lags(self._in_flight), right)
        stats = self._stats
        stats.verified += right
        stats.best_ids += [int(truth.ids[0]) for truth in truths[:right]]
        stats.speculation_was_right += [True] * right
        self._text.commit(steps[:right])
        self._in_flight = self._in_flight[right:]
        if all_right:
            return None
        self._text.roll_back(steps[right])
        stats.mismatched += 1
        stats.discarded += len(self._in_flight) - 1 + len(self._pending)
        self._in_flight, self._pending = [], []
        return truths[right]

    def _record_ranks(self, truths: list[Retrieved]) -> None:
        """Tells the automatic prefetch with which rank the cache had come by each best passage."""
        if self._auto_prefetch is None:
            return
        mismatch_seconds = self._scheduler.step_seconds + self._search_seconds(1)
        for speculated, truth in zip(self._in_flight, truths, strict=True):
            rank = self._cache.rank_of(int(truth.ids[0]))
            self._auto_prefetch.record(rank, speculated.cache_seconds, mismatch_seconds)
