"""One request, searched for step by step or speculated: RaLMSpec, arXiv 2401.14021, Algorithm 1."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import numpy as np

from ..retrieval.retriever import Retrieved
from .checked_search import CheckedRetriever, RalmError, RunningSearch
from .options import RalmSpeculation
from .os3 import Scheduler
from .request_cache import RequestCache
from .stats import RalmStats


class RetrievalAugmentedGeneration(Protocol):
    """A text generated step by step, each with the result of a query, that can be rolled back."""

    @property
    def finished(self) -> bool:
        """Whether the last step, speculated or not, has ended the text."""

    def query(self) -> Any:
        """The query of the next step."""

    def step(self, found: Retrieved) -> Any:
        """Generates with `found` until the next query; returns what the methods below take."""

    def agrees(self, step: Any, truth: Retrieved) -> bool:
        """Whether the step would have generated the same with `truth`."""

    def roll_back(self, step: Any) -> None:
        """Undoes a step and all later ones."""

    def commit(self, steps: Sequence[Any]) -> None:
        """Receives the next verified steps; speculated ones may follow them."""


@dataclass
class Request:
    """The baseline, RaLMSeq: waits for a search before every step."""

    text: RetrievalAugmentedGeneration
    retriever: CheckedRetriever
    k: int
    stats: RalmStats
    clock: Callable[[], float]
    _query_seconds: float = field(init=False, default=0.0)  # of the last query

    def run(self) -> None:
        while not self.text.finished:
            (truth,), _ = self._finish(self._begin([self._query()], self.k))
            self._take(truth)

    def _query(self) -> Any:
        began = self.clock()
        query = self.text.query()
        self._query_seconds = self.clock() - began
        self.stats.query_seconds += self._query_seconds
        return query

    def _begin(self, queries: list[Any], count: int) -> RunningSearch:
        self.stats.searches += 1
        self.stats.retrievals += len(queries)
        return self.retriever.begin(queries, count)

    def _finish(self, search: RunningSearch) -> tuple[list[Retrieved], float]:
        began = self.clock()
        truths, seconds = self.retriever.finish(search)
        self.stats.waiting_seconds += self.clock() - began
        self.stats.verification_seconds += seconds
        return truths, seconds

    def _take(self, truth: Retrieved) -> Any:
        """Generates one step with what the retriever found."""
        step = self._step(truth.first(self.k))
        self.text.commit([step])
        self.stats.best_ids.append(int(truth.ids[0]))
        self.stats.speculation_was_right.append(False)
        return step

    def _step(self, found: Retrieved) -> Any:
        began = self.clock()
        step = self.text.step(found)
        self.stats.model_seconds += self.clock() - began
        return step


@dataclass(slots=True)
class _Speculated:
    """A step that awaits its verification."""

    query: Any
    step: Any


@dataclass(slots=True)
class _Verification:
    """A search, and the guessed steps that it verifies, in the order of the text. If it `waits`,
    the step of its last query has not been generated yet."""

    search: RunningSearch
    speculated: list[_Speculated]
    waits: bool
    busy_before: float  # seconds that the model had been busy with the request when it began
    overhead: float  # seconds that beginning it took


@dataclass
class SpeculativeRequest(Request):
    """A text, its request cache, and the steps that await verification: Algorithm 1."""

    speculation: RalmSpeculation
    scheduler: Scheduler
    neighbours: Callable[[np.ndarray], np.ndarray] | None
    expected_contention: float
    cache: RequestCache  # begins with the ids that earlier requests retrieved
    guessing: bool = field(init=False, default=False)  # and not verifying
    # The steps of running searches, then those after them that no search verifies yet.
    _running: deque[_Verification] = field(init=False, default_factory=deque)
    # Searches for steps that were undone: their passages are often those of the steps instead.
    _abandoned: list[RunningSearch] = field(init=False, default_factory=list)
    _pending: list[_Speculated] = field(init=False, default_factory=list)

    def run(self) -> None:
        try:
            self._generate()
        except RalmError:
            unverified = [*chain(*(one.speculated for one in self._running)), *self._pending]
            if unverified:
                self.text.roll_back(unverified[0].step)
                self.stats.discarded += len(unverified)
            raise

    def _generate(self) -> None:
        warm = len(self.cache.ids) > 0
        self.scheduler.begin_request(warm, self.expected_contention)
        if not (warm or self.text.finished):  # the initial retrieval fills the cache
            count = max(self.k, self.speculation.prefetch)
            truths, seconds = self._finish(self._begin([self._query()], count))
            self.scheduler.measured.record_search(1, seconds, 0.0)
            self._fill_cache(truths)
            self._take(truths[0])
        while self._running or self._pending or not self.text.finished:
            self.guessing = True
            if not self._running:
                stride = self._stride()
                while len(self._pending) < stride - 1 and not self.text.finished:
                    self._pending.append(self._speculate(self._query()))
                self._search(stride)
            guess = self._speculate_meanwhile()
            self.guessing = False
            self._verify(guess)

    def _stride(self) -> int:
        if self.speculation.stride == "os3":
            return self.scheduler.stride(len(self._pending))
        return max(self.speculation.stride, len(self._pending) + 1)

    def _step(self, found: Retrieved, meanwhile: bool = False) -> Any:
        before = self.stats.model_seconds
        first = not (self.stats.best_ids or self._unverified)
        step = super()._step(found)
        seconds = self.stats.model_seconds - before + self._query_seconds
        self.scheduler.measured.record_step(seconds, meanwhile, first)
        return step

    @property
    def _unverified(self) -> int:
        """The number of speculated steps that no search has verified."""
        return sum(len(one.speculated) for one in self._running) + len(self._pending)

    @property
    def _busy_seconds(self) -> float:
        stats = self.stats
        return stats.model_seconds + stats.query_seconds + stats.cache_seconds

    def _fill_cache(self, truths: list[Retrieved]) -> None:
        began = self.clock()
        ids = np.concatenate([truth.ids for truth in truths])
        if self.neighbours is not None:
            ids = np.concatenate([ids, self.neighbours(ids)])
        self.cache.add(ids)
        self.stats.cache_seconds += self.clock() - began

    def _guess(self, query: Any) -> Retrieved:
        """The best passages for a query among those in the request cache."""
        for search in self._abandoned[:]:
            if search.answer.done():
                self._abandoned.remove(search)
                self._fill_cache(self.retriever.finish(search)[0])
        began = self.clock()
        ids = self.cache.ids
        found = Retrieved.best(ids, self.retriever.score(query, ids), self.k)
        seconds = self.clock() - began
        self.stats.cache_seconds += seconds
        self.scheduler.measured.guesses.append(seconds)
        return found

    def _speculate(self, query: Any, meanwhile: bool = False) -> _Speculated:
        """Generates one step with a guess."""
        step = self._step(self._guess(query), meanwhile)
        self.stats.speculated += 1
        return _Speculated(query, step)

    def _search(self, stride: int) -> None:
        """Begins a search with the queries of the next `stride` steps: pending ones, and the one
        after them."""
        began = self.clock()
        speculated = self._pending[:stride]
        self._pending = self._pending[stride:]
        queries = [one.query for one in speculated]
        waits = len(queries) < stride and not self.text.finished
        if waits:
            queries.append(self._query())
        wide = self.speculation.prefetch_searches == "all"
        count = max(self.k, self.speculation.prefetch if wide else 1)
        search = self._begin(queries, count)
        self.stats.strides.append(len(queries))
        overhead = self.clock() - began
        self._running.append(_Verification(search, speculated, waits, self._busy_seconds, overhead))

    def _speculate_meanwhile(self) -> Retrieved | None:
        """Speculates the steps that pay while the oldest search runs, and begins further searches
        for them if the retriever takes several at a time. If the step of that search's last query
        does not pay, returns the guess for it, to learn from."""
        oldest = self._running[0]
        while not oldest.search.answer.done():
            if self._another_search_pays():
                self._search(len(self._pending) + 1)
            newest = self._running[-1]
            if self.text.finished or not self.scheduler.one_more_pays(
                len(oldest.search.queries),
                self._unverified,
                elapsed=self.clock() - oldest.search.began,
            ):
                break
            if newest.waits:
                newest.waits = False
                newest.speculated.append(self._speculate(newest.search.queries[-1], meanwhile=True))
            else:
                self._pending.append(self._speculate(self._query(), meanwhile=True))
        if oldest.waits and self.scheduler.learning_pays:
            return self._guess(oldest.search.queries[-1])
        return None

    def _another_search_pays(self) -> bool:
        """Whether to begin a search beside those that run. They are spread over the time of one, so
        that each verifies the steps that were generated since the last one began. As published,
        searches follow one another."""
        newest = self._running[-1]
        if newest.waits or not self._pending or not self.retriever.idle:
            return False
        if self.speculation.max_gamma is not None or not self.speculation.asynchronous:
            return False
        apart = self.scheduler.measured.search(1) / self.retriever.concurrent_searches
        return self.clock() - newest.search.began >= apart

    def _verify(self, guess: Retrieved | None) -> None:
        """Waits for the oldest search, keeps the steps that guessed right, and generates the one
        after them with its answer. `guess` is the one for its step that was not generated."""
        verification = self._running[0]
        search = verification.search
        busy_seconds = self._busy_seconds - verification.busy_before
        truths, search_seconds = self._finish(search)
        finished = self.clock()
        self.scheduler.measured.record_search(len(search.queries), search_seconds, busy_seconds)
        self._fill_cache(truths)
        truths = [truth.first(self.k) for truth in truths]
        reached = len(verification.speculated)
        right = self._keep_right(truths)
        overhead = verification.overhead + self.clock() - finished
        self.scheduler.measured.overheads.append(overhead)
        if right < len(truths):
            step = self._take(truths[right])
            if guess is not None and right == reached:
                reached += 1
                right += self.text.agrees(step, guess)
        if reached:
            self.scheduler.record(right, right < reached)

    def _keep_right(self, truths: list[Retrieved]) -> int:
        """Commits the steps of the oldest search before the first wrong one, and undoes that one
        and all later ones. Returns the number of the right ones."""
        verified = self._running.popleft().speculated
        stats = self.stats
        agreed = (
            self.text.agrees(speculated.step, truth)
            for speculated, truth in zip(verified, truths, strict=False)
        )
        right = next((i for i, same in enumerate(agreed) if not same), len(verified))
        stats.verified += right
        stats.best_ids += [int(truth.ids[0]) for truth in truths[:right]]
        stats.speculation_was_right += [True] * right
        self.text.commit([speculated.step for speculated in verified[:right]])
        if right < len(verified):
            self.text.roll_back(verified[right].step)
            stats.mismatched += 1
            stats.discarded += len(verified) - right - 1 + self._unverified
            self._abandoned += [verification.search for verification in self._running]
            self._running.clear()
            self._pending.clear()
        return right
