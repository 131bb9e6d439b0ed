"""Algorithm 1 of RaLMSpec (arXiv 2401.14021): generation with speculative retrieval.

A step generates with the result of a query, until the next query. [`RaLMSeq`], the baseline, waits
for a search before every step. [`RaLMSpec`] guesses the results:

    until the text is finished
        while fewer than s - 1 steps are speculated          # s: the stride, see `os3.py`
            guess a query's result from the request cache, and generate a step with it
        search for their queries and the next step's, in one batch
        while the search runs, speculate further steps       # asynchronous verification
        keep the steps that its answers would not have changed
        undo the first other step and all later ones
        generate one step with the search's answer

The text is the same as without speculation, provided that the result of a query does not depend on
the batch, and that its best k are the first k of any larger number.

As in the authors' code, the step of a search's last query waits for the answer: a stride counts
queries, and a stride of 1 is the baseline. (Algorithm 1, read literally, guesses all s steps, and
repeats a step after each wrong guess.) Beyond it, further searches begin while one runs if the
retriever takes several at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..retrieval.retriever import Retrieved
from .checked_search import CheckedRetriever, RalmError, RunningSearch
from .options import RalmSpeculation
from .os3 import Scheduler
from .stats import RalmStats

# Ids that a request cache holds: scoring more takes longer than the search that a guess saves.
MOST_CACHED = 1 << 14
NO_IDS = np.empty(0, dtype=np.int64)


class Text(Protocol):
    """A text that is generated step by step, each with a query's result, and can be rolled back."""

    @property
    def finished(self) -> bool:
        """True if the last step, speculated or not, has ended the text."""

    def query(self) -> Any:
        """The query of the next step."""

    def step(self, found: Retrieved) -> Any:
        """Generates with `found` until the next query."""

    def agrees(self, step: Any, truth: Retrieved) -> bool:
        """True if the step would have generated the same with `truth`."""

    def roll_back(self, step: Any) -> None:
        """Undoes a step and all later ones."""

    def commit(self, steps: Sequence[Any]) -> None:
        """Receives the next verified steps; speculated ones may follow them."""


class _Query(NamedTuple):
    value: Any
    seconds: float  # to encode it


@dataclass
class RaLMSeq:
    """The baseline: waits for a search before every step."""

    text: Text
    retriever: CheckedRetriever
    k: int  # passages that a step needs
    stats: RalmStats

    def run(self) -> None:
        """Generates until the text is finished and every step of it is verified."""
        while not self.text.finished:
            query = self._query()
            [truth], _ = self._wait(self._begin([query], self.k))
            self._take(query, truth)

    def _query(self) -> _Query:
        value, seconds = self._timed(self.text.query)
        self.stats.add(query_seconds=seconds)
        return _Query(value, seconds)

    def _begin(self, queries: Sequence[_Query], count: int) -> RunningSearch:
        self.stats.add(searches=1, retrievals=len(queries))
        return self.retriever.begin([query.value for query in queries], count)

    def _wait(self, search: RunningSearch) -> tuple[list[Retrieved], float]:
        """The results of a search's queries, and its seconds."""
        (truths, seconds), waited = self._timed(self.retriever.finish, search)
        self.stats.add(waiting_seconds=waited, search_seconds=seconds)
        return truths, seconds

    def _take(self, query: _Query, truth: Retrieved) -> Any:
        """Generates one step with the retriever's answer."""
        step = self._step(query, truth.first(self.k))
        self._commit([step], [truth], guessed=False)
        return step

    def _step(self, query: _Query, found: Retrieved) -> Any:
        step, seconds = self._timed(self.text.step, found)
        self.stats.add(model_seconds=seconds)
        return step

    def _commit(self, steps: Sequence[Any], truths: Sequence[Retrieved], guessed: bool) -> None:
        best_ids = [int(truth.ids[0]) for truth in truths]
        self.stats.add(best_ids=best_ids, speculation_was_right=[guessed] * len(steps))
        self.text.commit(steps)

    def _timed(self, function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
        began = perf_counter()
        result = function(*args)
        return result, perf_counter() - began


class RequestCache:
    """The ids from which a request speculates (section 3): retrieved ones, and `earlier` ones.

    Beyond `MOST_CACHED` the oldest are dropped, but no id of the last addition."""

    def __init__(self, earlier: np.ndarray = NO_IDS) -> None:
        self.newest_first = earlier  # int64, (n,)
        self.ids = np.sort(earlier)  # int64, (n,), ascending

    def add(self, ids: np.ndarray) -> None:
        """Adds retrieved ids (int64 of shape `(m,)`, with repetitions)."""
        added = np.unique(ids)
        older = self.newest_first[~np.isin(self.newest_first, added, assume_unique=True)]
        self.newest_first = np.concatenate([added, older])[: max(MOST_CACHED, len(added))]
        self.ids = np.sort(self.newest_first)


@dataclass(slots=True)
class _Verification:
    """A search, and the guessed steps of its first queries, in the order of the text."""

    search: RunningSearch
    queries: list[_Query]
    steps: list[Any]
    overhead: float  # seconds that beginning it took
    waited_before: float  # seconds for which nothing but searches ran before it began

    @property
    def waits(self) -> bool:
        """True if the step of its last query has not been generated yet."""
        return len(self.steps) < len(self.queries)


@dataclass
class RaLMSpec(RaLMSeq):
    """Algorithm 1: a text, its request cache, and the steps that await verification."""

    speculation: RalmSpeculation
    scheduler: Scheduler
    neighbours: Callable[[np.ndarray], np.ndarray] | None  # further ids (n,) -> (m,) for the cache
    expected_contention: float
    earlier: np.ndarray  # ids (n,) that earlier requests retrieved: the cache begins with them
    cache: RequestCache = field(init=False)
    _guessing: bool = field(init=False, default=False)  # and not verifying
    # The steps of running searches, then those after them that no search verifies yet.
    _running: deque[_Verification] = field(init=False, default_factory=deque)
    _pending: list[tuple[_Query, Any]] = field(init=False, default_factory=list)
    # Searches for steps that were undone: their passages are often right for the steps instead.
    _abandoned: list[RunningSearch] = field(init=False, default_factory=list)

    def run(self) -> None:
        """As above; if a guess from earlier ids fails, without these from there on."""
        while True:
            try:
                self._generate()
                return
            except RalmError:
                unverified = [*chain(*(one.steps for one in self._running))]
                unverified += [step for _, step in self._pending]
                if unverified:
                    self.text.roll_back(unverified[0])
                    self.stats.add(discarded=len(unverified))
                if not self._guessing or not len(self.earlier):
                    raise
            self.earlier = NO_IDS

    def _generate(self) -> None:
        self.cache = RequestCache(self.earlier)
        self._running.clear()
        self._pending.clear()
        self._abandoned.clear()
        self._guessing = False
        warm = len(self.earlier) > 0
        self.scheduler.begin_request(warm, self.expected_contention)
        if not (warm or self.text.finished):  # the initial retrieval fills the cache
            query = self._query()
            search = self._begin([query], max(self.k, self.speculation.prefetch))
            truths, seconds = self._wait(search)
            self.scheduler.measured.record_search(1, seconds, 0.0)
            self._fill_cache(truths)
            self._take(query, truths[0])
        while self._running or self._pending or not self.text.finished:
            self._guessing = True
            if not self._running:
                self._speculate_stride()
            self._speculate_while_searching()
            oldest = self._running[0]
            guess = None
            if oldest.waits and self.scheduler.learning_pays:
                guess = self._guess(oldest.queries[-1])
            self._guessing = False
            self._verify(guess)

    def _speculate_stride(self) -> None:
        """Speculates the steps of a stride, and begins the search that verifies them."""
        if self.speculation.stride == "os3":
            stride = self.scheduler.stride(len(self._pending))
        else:
            stride = max(self.speculation.stride, len(self._pending) + 1)
        while len(self._pending) < stride - 1 and not self.text.finished:
            self._speculate_next()
        self._search(stride)

    def _search(self, stride: int) -> None:
        """Begins a search with the queries of pending steps and of the one after them."""
        began = perf_counter()
        queries = [query for query, _ in self._pending[:stride]]
        steps = [step for _, step in self._pending[:stride]]
        del self._pending[:stride]
        if len(queries) < stride and not self.text.finished:
            queries.append(self._query())
        wide = self.speculation.prefetch_searches == "all"
        search = self._begin(queries, max(self.k, self.speculation.prefetch if wide else 1))
        self.stats.strides.append(len(queries))
        overhead, waited = perf_counter() - began, self.stats.waiting_seconds
        self._running.append(_Verification(search, queries, steps, overhead, waited))

    def _speculate_while_searching(self) -> None:
        """Speculates the steps that pay during the oldest search, and may begin other searches."""
        oldest = self._running[0]
        while not oldest.search.answer.done():
            if self._another_search_pays():
                self._search(len(self._pending) + 1)
            newest = self._running[-1]
            elapsed = perf_counter() - oldest.search.began
            batch = len(oldest.queries)
            pays = self.scheduler.one_more_pays(batch, self._unverified, elapsed)
            if self.text.finished or not pays:
                return
            if newest.waits:
                newest.steps.append(self._speculate(newest.queries[-1], meanwhile=True))
            else:
                self._speculate_next(meanwhile=True)

    def _another_search_pays(self) -> bool:
        """True if a further search should begin while others run, never as published.

        Searches are spread over the time of one: each verifies the steps generated since the last
        began."""
        newest = self._running[-1]
        if newest.waits or not self._pending or not self.retriever.idle:
            return False
        if self.speculation.max_gamma is not None or not self.speculation.asynchronous:
            return False
        apart = self.scheduler.measured.search(1) / self.retriever.concurrent_searches
        return perf_counter() - newest.search.began >= apart

    def _verify(self, guess: Retrieved | None) -> None:
        """Waits for the oldest search, keeps the right steps, and generates the one after them.

        A `guess` for the step that waits is compared, so that gamma is learned from it."""
        verification = self._running[0]
        measured = self.scheduler.measured
        waited = self.stats.waiting_seconds - verification.waited_before
        busy_seconds = perf_counter() - verification.search.began - waited
        found, seconds = self._wait(verification.search)
        finished = perf_counter()
        measured.record_search(len(verification.queries), seconds, busy_seconds)
        self._fill_cache(found)
        truths = [truth.first(self.k) for truth in found]
        reached = len(verification.steps)
        right = self._keep_right(truths)
        measured.overheads.append(verification.overhead + perf_counter() - finished)
        if right < len(truths):
            step = self._take(verification.queries[right], truths[right])
            if guess is not None and right == reached:
                reached += 1
                right += self.text.agrees(step, guess)
        if reached:
            self.scheduler.record(right, right < reached)

    def _keep_right(self, truths: list[Retrieved]) -> int:
        """Commits the oldest search's right steps, and undoes all others; returns their number."""
        steps = self._running[0].steps
        agreed = (self.text.agrees(step, truth) for step, truth in zip(steps, truths, strict=False))
        right = next((i for i, same in enumerate(agreed) if not same), len(steps))
        self._running.popleft()
        self.stats.add(verified=right)
        self._commit(steps[:right], truths[:right], guessed=True)
        if right < len(steps):
            self.text.roll_back(steps[right])
            self.stats.add(mismatched=1, discarded=len(steps) - right - 1 + self._unverified)
            self._abandoned += [running.search for running in self._running]
            self._running.clear()
            self._pending.clear()
        return right

    @property
    def _unverified(self) -> int:
        """The number of speculated steps that await verification."""
        return sum(len(running.steps) for running in self._running) + len(self._pending)

    def _speculate_next(self, meanwhile: bool = False) -> None:
        """Speculates the step after all others."""
        query = self._query()
        self._pending.append((query, self._speculate(query, meanwhile)))

    def _speculate(self, query: _Query, meanwhile: bool = False) -> Any:
        """Generates one step with a guess, `meanwhile` a search runs or not."""
        step = self._step(query, self._guess(query), meanwhile)
        self.stats.add(speculated=1)
        return step

    def _guess(self, query: _Query) -> Retrieved:
        """The best passages for a query among those in the request cache."""
        for search in self._abandoned[:]:
            if search.answer.done():
                self._abandoned.remove(search)
                self._fill_cache(self.retriever.finish(search)[0])
        began = perf_counter()
        ids = self.cache.ids
        found = Retrieved.best(ids, self.retriever.score(query.value, ids), self.k)
        seconds = perf_counter() - began
        self.scheduler.measured.guesses.append(seconds)
        self.stats.add(cache_seconds=seconds)
        return found

    def _fill_cache(self, truths: Sequence[Retrieved]) -> None:
        began = perf_counter()
        ids = np.concatenate([truth.ids for truth in truths])
        if self.neighbours is not None:
            ids = np.concatenate([ids, self.neighbours(ids)])
        self.cache.add(ids)
        self.stats.add(cache_seconds=perf_counter() - began)

    def _step(self, query: _Query, found: Retrieved, meanwhile: bool = False) -> Any:
        is_first = not (self.stats.steps or self._unverified)
        step, seconds = self._timed(super()._step, query, found)
        self.scheduler.measured.record_step(query.seconds + seconds, meanwhile, is_first)
        return step
