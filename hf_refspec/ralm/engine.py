"""Speculative retrieval (RaLMSpec, arXiv 2401.14021, Algorithm 1).

A step generates with the result of a query, until the next query. Without speculation, every step
waits for the retriever. Here a request cache answers instead, and one batched search verifies
several speculated steps. The first step that would have been different with the search's answer is
undone, with all later ones, and repeated with that answer. The text is the same as without
speculation, provided that the result of a query does not depend on the batch, and that its best k
are the first k of any larger number.

Unlike in the paper, a search also takes the query of the next step along, which then needs no
guess. A search for that query alone is the baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import BaseStreamer

from ..generation.row import Row
from ..generation.validation import check_model, check_request
from ..retrieval.retriever import Retrieved, Retriever
from ..retrieval.vector_index import LEAST_WALKED
from .checked_search import CheckedRetriever, RetrievalError, RunningSearch
from .options import Speculation
from .os3 import PublishedGamma, Scheduler, StrideScheduler, WaitingScheduler
from .stats import RetrievalStats

# The entry of a retriever's `__dict__` that keeps what was learned of it.
LEARNED = "_learned_by_speculation"
# The most ids of a request cache. Scoring more would take longer than the search that it saves.
_MOST_HELD = 1 << 14
# What scoring the ids of earlier requests may take, of the time of a search and of a step.
_EARLIER_COST = 0.05
_NO_IDS = np.empty(0, dtype=np.int64)


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


def generate_speculatively(
    text: RetrievalAugmentedGeneration,
    retriever: Retriever,
    speculation: Speculation | None,
    k: int,
    neighbours: Callable[[np.ndarray], np.ndarray] | None = None,
    stats: RetrievalStats | None = None,
    clock: Callable[[], float] = perf_counter,
) -> RetrievalStats:
    """Generates until the text is finished and every step of it is verified.

    A `RetrievalError` leaves the text with its verified steps alone. The retriever is searched in
    another thread, and keeps what was learned of it for the next call.

    Args:
        speculation ([`Speculation`], *optional*): `None` for the baseline (RaLMSeq): a search
            before every step.
        k (`int`): How many passages a step needs.
        neighbours (callable, *optional*): Maps the ids that a search found (int64 of shape `(n,)`)
            to further ones for the request cache (spatial locality; section 5.3).
        stats ([`RetrievalStats`], *optional*): Is cleared, filled and returned.
    """
    stats = RetrievalStats() if stats is None else stats
    stats.clear()
    with closing(CheckedRetriever(retriever, k, clock)) as checked:
        if speculation is None:
            _Request(text, checked, k, stats, clock).run()
            return stats
        _check_prefetch(retriever, speculation, k)
        learned = _Learned()  # as published: of this request alone
        if speculation.max_gamma is None and hasattr(retriever, "__dict__"):
            learned = vars(retriever).setdefault(LEARNED, learned)
        setting = (k, speculation.prefetch, speculation.asynchronous)
        kept, earlier = learned.get(setting, (None, _NO_IDS))
        scheduler = deepcopy(kept) or _new_scheduler(retriever, speculation)
        request = _SpeculativeRequest(
            *(text, checked, k, stats, clock, speculation, scheduler, neighbours, earlier)
        )
        request.run()
        _, now = learned.get(setting, (None, _NO_IDS))
        others = now[~np.isin(now, earlier)]  # of calls that have ended meanwhile
        learned[setting] = scheduler, request.ids_to_keep(others)
    return stats


class _Learned(dict[tuple, tuple[Scheduler, np.ndarray]]):
    """What the calls of a retriever have learned, by setting: the scheduler, and the ids they
    retrieved, the newest first. An entry is replaced, never changed, so that threads can share it.
    A deep copy or pickle of the retriever begins with nothing."""

    def __reduce__(self) -> tuple[type[_Learned], tuple]:
        return _Learned, ()


def _new_scheduler(retriever: Retriever, speculation: Speculation) -> Scheduler:
    if speculation.max_gamma is not None:
        gamma = PublishedGamma(speculation.max_gamma)
        return StrideScheduler(gamma, int(speculation.asynchronous))
    exact = getattr(retriever, "index", None) == "flat"
    return WaitingScheduler(speculation.asynchronous, exact)


def _check_prefetch(retriever: Any, speculation: Speculation, k: int) -> None:
    """Refuses more passages than a graph walks anyway, since with more it may find a better one."""
    index = getattr(retriever, "index", None)
    most = max(k, getattr(retriever, "ef_search", LEAST_WALKED))
    if isinstance(index, str) and index == "hnsw" and speculation.prefetch > most:
        raise ValueError(
            f'prefetch must be at most {most} with index="hnsw" and k={k}, but is '
            f"{speculation.prefetch}; or give the retriever a larger ef_search"
        )


@dataclass
class _Request:
    """The baseline, RaLMSeq: waits for a search before every step."""

    _text: RetrievalAugmentedGeneration
    _retriever: CheckedRetriever
    _k: int
    _stats: RetrievalStats
    _clock: Callable[[], float]
    _query_seconds: float = field(init=False, default=0.0)  # of the last query

    def run(self) -> None:
        while not self._text.finished:
            truth, _ = self._retrieve(self._k)
            self._take(truth)

    def _query(self) -> Any:
        began = self._clock()
        query = self._text.query()
        self._query_seconds = self._clock() - began
        self._stats.query_seconds += self._query_seconds
        return query

    def _retrieve(self, count: int) -> tuple[Retrieved, float]:
        (truth,), seconds = self._finish(self._retriever.begin([self._query()], count))
        return truth, seconds

    def _finish(self, search: RunningSearch) -> tuple[list[Retrieved], float]:
        began = self._clock()
        truths, seconds = self._retriever.finish(search)
        self._stats.waiting_seconds += self._clock() - began
        self._stats.verification_seconds += seconds
        self._stats.searches += 1
        self._stats.retrievals += len(truths)
        return truths, seconds

    def _take(self, truth: Retrieved) -> Any:
        """Generates one step with what the retriever found."""
        step = self._step(truth.first(self._k))
        self._text.commit([step])
        self._stats.best_ids.append(int(truth.ids[0]))
        self._stats.speculation_was_right.append(False)
        return step

    def _step(self, found: Retrieved) -> Any:
        began = self._clock()
        step = self._text.step(found)
        self._stats.model_seconds += self._clock() - began
        return step


class RequestCache:
    """The ids (int64, ascending) from which a request speculates (section 3): those that it
    retrieved, and `earlier` ones. Beyond `most` the oldest are dropped, but none of those added
    last."""

    def __init__(self, most: int = _MOST_HELD, earlier: np.ndarray = _NO_IDS) -> None:
        self._most = most
        self.newest_first, self.ids = earlier, np.sort(earlier)

    def add(self, ids: np.ndarray) -> None:
        """Adds retrieved ids (int64 of shape `(m,)`, with repetitions)."""
        added = np.unique(ids)
        older = self.newest_first[~np.isin(self.newest_first, added, assume_unique=True)]
        self.newest_first = np.concatenate([added, older])[: max(self._most, len(added))]
        self.ids = np.sort(self.newest_first)


@dataclass(slots=True)
class _Speculated:
    """A step that awaits its verification."""

    query: Any
    step: Any


@dataclass
class _SpeculativeRequest(_Request):
    """A text, its request cache, and the steps that await verification: Algorithm 1."""

    _speculation: Speculation
    _scheduler: Scheduler
    _neighbours: Callable[[np.ndarray], np.ndarray] | None
    _earlier: np.ndarray  # ids that earlier requests retrieved, the newest first

    def __post_init__(self) -> None:
        self._count = max(self._k, self._speculation.prefetch)  # passages of each search
        self._cache = RequestCache(earlier=self._earlier)
        self._guessing = False  # or verifying
        # Steps in the order of the text: those that a search is verifying, then those after them.
        self._in_flight: list[_Speculated] = []
        self._pending: list[_Speculated] = []
        # Whether the last query of a search may be that of a step that waits for its result.
        ours = self._speculation.max_gamma is None
        self._may_wait = ours and self._speculation.stride == "os3"

    def run(self) -> None:
        try:
            warm = self._may_wait and len(self._earlier) > 0
            self._scheduler.begin_request(warm)
            if not (warm or self._text.finished):  # the initial retrieval fills the cache
                truth, seconds = self._retrieve(self._count)
                self._scheduler.measured.record_search(1, seconds, 0.0)
                self._fill_cache([truth])
                self._take(truth)
            while self._pending or not self._text.finished:
                self._guessing = True
                stride = self._stride()
                while len(self._pending) < stride - self._may_wait and not self._text.finished:
                    self._pending.append(self._speculate(self._query()))
                self._verify(stride)
        except RetrievalError:
            unverified = [*self._in_flight, *self._pending]
            if unverified:
                self._text.roll_back(unverified[0].step)
                self._stats.discarded += len(unverified)
            if not self._guessing or not len(self._earlier):
                raise
            # The knowledge base may lack some of the earlier ids by now: go on without them.
            self._earlier = _NO_IDS
            self.__post_init__()
            self.run()

    def ids_to_keep(self, others: np.ndarray) -> np.ndarray:
        """The ids for the next request, the newest first, with `others` that are unknown here."""
        own, measured = self._cache.newest_first, self._scheduler.measured
        seconds = _EARLIER_COST * min(measured.search(1), measured.step)
        most = min(_MOST_HELD, int(len(own) * seconds / max(measured.guess, 1e-9)))
        return np.concatenate([own, others[~np.isin(others, own)]])[:most]

    def _stride(self) -> int:
        if self._speculation.stride == "os3":
            return self._scheduler.stride(len(self._pending))
        return max(self._speculation.stride, len(self._pending))

    def _step(self, found: Retrieved, beside: bool = False) -> Any:
        before, stats = self._stats.model_seconds, self._stats
        first = not (stats.best_ids or self._in_flight or self._pending)
        step = super()._step(found)
        seconds = stats.model_seconds - before + self._query_seconds
        self._scheduler.measured.record_step(seconds, beside, first)
        return step

    def _fill_cache(self, truths: list[Retrieved]) -> None:
        began = self._clock()
        ids = np.concatenate([truth.ids for truth in truths])
        if self._neighbours is not None:
            ids = np.concatenate([ids, self._neighbours(ids)])
        self._cache.add(ids)
        self._stats.cache_seconds += self._clock() - began

    def _guess(self, query: Any) -> Retrieved:
        """What the retriever would find, as far as the request cache knows."""
        began = self._clock()
        ids = self._cache.ids
        found = Retrieved.best(ids, self._retriever.score(query, ids), self._k)
        seconds = self._clock() - began
        self._stats.cache_seconds += seconds
        self._scheduler.measured.guesses.append(seconds)
        return found

    def _speculate(self, query: Any, beside: bool = False) -> _Speculated:
        """Generates one step with a guess."""
        step = self._step(self._guess(query), beside)
        self._stats.speculated += 1
        return _Speculated(query, step)

    def _verify(self, stride: int) -> None:
        """Searches with the queries of the next `stride` steps, and keeps the steps that guessed
        right. The one after them is generated with what was found for it, if anything."""
        began = self._clock()
        self._in_flight, self._pending = self._pending[:stride], self._pending[stride:]
        queries = [speculated.query for speculated in self._in_flight]
        waits = self._may_wait and len(queries) < stride and not self._text.finished
        if waits:
            queries.append(self._query())
        search = self._retriever.begin(queries, self._count)
        guess = self._work_beside(search, waits)
        self._guessing, went_on = False, self._clock() - began
        truths, search_seconds = self._finish(search)
        self._stats.strides.append(len(queries))
        self._scheduler.measured.record_search(len(queries), search_seconds, went_on)
        self._fill_cache(truths)
        truths = [truth.first(self._k) for truth in truths]
        reached, right = len(self._in_flight), self._keep_right(truths)
        overhead = self._clock() - began - max(went_on, search_seconds)
        self._scheduler.measured.overheads.append(max(overhead, 0.0))
        if right < len(truths):
            step = self._take(truths[right])
            if guess is not None and right == reached:
                reached += 1
                right += self._text.agrees(step, guess)
        if reached:
            self._scheduler.record(right, right < reached)

    def _work_beside(self, search: RunningSearch, waits: bool) -> Retrieved | None:
        """Speculates the steps that pay beside a search, the first of which `waits` for it. If not
        even that one pays, returns a guess of what it will be generated with, to learn from."""
        while (
            not search.answer.done()
            and not self._text.finished
            and self._scheduler.one_more_pays(
                len(search.queries),
                len(self._in_flight) + len(self._pending),
                elapsed=self._clock() - search.began,
            )
        ):
            if waits:
                self._in_flight.append(self._speculate(search.queries[-1], beside=True))
                waits = False
            else:
                self._pending.append(self._speculate(self._query(), beside=True))
        if waits and self._scheduler.learning_pays:
            return self._guess(search.queries[-1])
        return None

    def _keep_right(self, truths: list[Retrieved]) -> int:
        """Commits the steps before the first wrong one, whose number it returns, and undoes it and
        all later ones."""
        verified, stats = self._in_flight, self._stats
        agreed = (
            self._text.agrees(speculated.step, truth)
            for speculated, truth in zip(verified, truths, strict=False)
        )
        right = next((i for i, same in enumerate(agreed) if not same), len(verified))
        stats.verified += right
        stats.best_ids += [int(truth.ids[0]) for truth in truths[:right]]
        stats.speculation_was_right += [True] * right
        self._text.commit([speculated.step for speculated in verified[:right]])
        self._in_flight = verified[right:]
        if self._in_flight:
            self._text.roll_back(verified[right].step)
            stats.mismatched += 1
            stats.discarded += len(self._in_flight) - 1 + len(self._pending)
            self._in_flight, self._pending = [], []
        return right


def check_call(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    stats: Any,
    caller: str,
) -> None:
    """Refuses what `caller` cannot do; the arguments are as `generate` has prepared them."""
    if stats is not None and not isinstance(stats, RetrievalStats):
        raise TypeError(
            "`retrieval_stats` must be a `hf_refspec.RetrievalStats()` to be filled, or None, but "
            f"is {stats!r}."
        )
    check_model(model, caller)
    check_request(input_ids, generation_config, model_kwargs, caller)
    if len(input_ids) != 1:
        raise ValueError(
            f"`{caller}` continues one text, but `input_ids` has {len(input_ids)} rows. Pass one "
            "prompt at a time."
        )


def decode(
    text: RetrievalAugmentedGeneration,
    row: Row,
    retriever: Retriever,
    speculation: Speculation | None,
    k: int,
    stats: RetrievalStats | None,
    streamer: BaseStreamer | None,
    neighbours: Callable[[np.ndarray], np.ndarray] | None = None,
) -> None:
    """Generates a text; a `RetrievalError` carries the verified part of the row."""
    if streamer is not None:
        streamer.put(row.ids.cpu())
    try:
        generate_speculatively(text, retriever, speculation, k, neighbours, stats)
    except RetrievalError as error:
        error.text_ids = row.ids[0].tolist()
        raise
    if streamer is not None:
        streamer.end()
