"""Speculative retrieval (RaLMSpec, arXiv 2401.14021, Algorithm 1).

A step generates with the result of a query, until the next query. Without speculation, every step
waits for the retriever. With it a request cache answers first, and one batched search verifies
several speculated steps. The first step that the search's answer would have changed is undone, with
all later ones, and repeated with that answer. The text is the same as without speculation, provided
that the result of a query does not depend on the batch, and that its best k are the first k of any
larger number.

As in the authors' code, a search includes the query of the next step, which waits for the answer.
So a stride counts queries: all steps but that one are guessed, and a stride of 1 is the baseline.
(Algorithm 1, read literally, guesses them all, and repeats a step after each wrong guess.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, field, replace
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
from ..store.build.engine import usable_cores
from .checked_search import CheckedRetriever, RalmError, RunningSearch
from .options import RalmSpeculation
from .os3 import Scheduler
from .request_cache import Learned, RequestCache
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


def generate_with_retrieval(
    text: RetrievalAugmentedGeneration,
    retriever: Retriever,
    speculation: RalmSpeculation | None,
    k: int,
    neighbours: Callable[[np.ndarray], np.ndarray] | None = None,
    stats: RalmStats | None = None,
    model_threads: int = 1,
    clock: Callable[[], float] = perf_counter,
) -> RalmStats:
    """Generates until the text is finished and every step of it is verified.

    A `RalmError` leaves the text with its verified steps alone. The retriever is searched in
    another thread, and keeps what was learned of it for the next call.

    Args:
        speculation ([`RalmSpeculation`], *optional*): `None` for the baseline (RaLMSeq): a search
            before every step.
        k (`int`): How many passages a step needs.
        neighbours (callable, *optional*): Maps the ids that a search found (int64 of shape `(n,)`)
            to further ones for the request cache (spatial locality; section 5.3).
        stats ([`RalmStats`], *optional*): It is cleared, filled and returned.
        model_threads (`int`, *optional*, defaults to 1): The threads that a step keeps busy.
    """
    stats = RalmStats() if stats is None else stats
    stats.clear()
    with closing(CheckedRetriever(retriever, k, clock)) as checked:
        if speculation is None:
            _Request(text=text, retriever=checked, k=k, stats=stats, clock=clock).run()
            return stats
        _check_prefetch(retriever, speculation, k)
        learned = Learned.of(retriever, speculation)
        setting = (k, *astuple(speculation))
        scheduler, earlier = learned.begin(setting, retriever, speculation)
        request = _SpeculativeRequest(
            text=text,
            retriever=checked,
            k=k,
            stats=stats,
            clock=clock,
            speculation=speculation,
            scheduler=scheduler,
            neighbours=neighbours,
            expected_contention=_expected_contention(retriever, model_threads),
            cache=RequestCache(earlier=earlier),
        )
        try:
            request.run()
        except RalmError:
            if not request.guessing or not len(earlier):
                raise
            # The knowledge base may lack some of the earlier ids by now: go on without them.
            request = replace(request, cache=RequestCache())
            request.run()
        stats.contention = scheduler.measured.contention
        learned.end(setting, scheduler, request.cache.newest_first, earlier)
    return stats


def _expected_contention(retriever: Any, model_threads: int) -> float:
    """The factor by which a search and a step slow each other down if they need more cores than
    there are. Without `search_threads`, a retriever is assumed to search elsewhere."""
    search_threads = getattr(retriever, "search_threads", 0)
    return max((search_threads + model_threads) / usable_cores(), 1.0) if search_threads else 1.0


def _check_prefetch(retriever: Any, speculation: RalmSpeculation, k: int) -> None:
    """Refuses more passages than a graph walks: walking further may find a better best one."""
    walked = max(k, getattr(retriever, "ef_search", LEAST_WALKED))
    if str(getattr(retriever, "index", None)) == "hnsw" and speculation.prefetch > walked:
        raise ValueError(
            f'prefetch must be at most {walked} with index="hnsw" and k={k}, but is '
            f"{speculation.prefetch}; or give the retriever a larger ef_search"
        )


@dataclass
class _Request:
    """The baseline, RaLMSeq: waits for a search before every step."""

    text: RetrievalAugmentedGeneration
    retriever: CheckedRetriever
    k: int
    stats: RalmStats
    clock: Callable[[], float]
    _query_seconds: float = field(init=False, default=0.0)  # of the last query

    def run(self) -> None:
        while not self.text.finished:
            (truth,), _ = self._finish(self.retriever.begin([self._query()], self.k))
            self._take(truth)

    def _query(self) -> Any:
        began = self.clock()
        query = self.text.query()
        self._query_seconds = self.clock() - began
        self.stats.query_seconds += self._query_seconds
        return query

    def _finish(self, search: RunningSearch) -> tuple[list[Retrieved], float]:
        began = self.clock()
        truths, seconds = self.retriever.finish(search)
        self.stats.waiting_seconds += self.clock() - began
        self.stats.verification_seconds += seconds
        self.stats.searches += 1
        self.stats.retrievals += len(truths)
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


@dataclass
class _SpeculativeRequest(_Request):
    """A text, its request cache, and the steps that await verification: Algorithm 1."""

    speculation: RalmSpeculation
    scheduler: Scheduler
    neighbours: Callable[[np.ndarray], np.ndarray] | None
    expected_contention: float
    cache: RequestCache  # begins with the ids that earlier requests retrieved
    guessing: bool = field(init=False, default=False)  # and not verifying
    # Steps in the order of the text: those that a search is verifying, then those after them.
    _in_flight: list[_Speculated] = field(init=False, default_factory=list)
    _pending: list[_Speculated] = field(init=False, default_factory=list)

    def run(self) -> None:
        try:
            self._generate()
        except RalmError:
            unverified = [*self._in_flight, *self._pending]
            if unverified:
                self.text.roll_back(unverified[0].step)
                self.stats.discarded += len(unverified)
            raise

    def _generate(self) -> None:
        warm = len(self.cache.ids) > 0
        self.scheduler.begin_request(warm, self.expected_contention)
        if not (warm or self.text.finished):  # the initial retrieval fills the cache
            count = max(self.k, self.speculation.prefetch)
            truths, seconds = self._finish(self.retriever.begin([self._query()], count))
            self.scheduler.measured.record_search(1, seconds, 0.0)
            self._fill_cache(truths)
            self._take(truths[0])
        while self._pending or not self.text.finished:
            self.guessing = True
            stride = self._stride()
            while len(self._pending) < stride - 1 and not self.text.finished:
                self._pending.append(self._speculate(self._query()))
            self._verify(stride)

    def _stride(self) -> int:
        if self.speculation.stride == "os3":
            return self.scheduler.stride(len(self._pending))
        return max(self.speculation.stride, len(self._pending) + 1)

    def _step(self, found: Retrieved, meanwhile: bool = False) -> Any:
        before = self.stats.model_seconds
        first = not (self.stats.best_ids or self._in_flight or self._pending)
        step = super()._step(found)
        seconds = self.stats.model_seconds - before + self._query_seconds
        self.scheduler.measured.record_step(seconds, meanwhile, first)
        return step

    def _fill_cache(self, truths: list[Retrieved]) -> None:
        began = self.clock()
        ids = np.concatenate([truth.ids for truth in truths])
        if self.neighbours is not None:
            ids = np.concatenate([ids, self.neighbours(ids)])
        self.cache.add(ids)
        self.stats.cache_seconds += self.clock() - began

    def _guess(self, query: Any) -> Retrieved:
        """The best passages for a query among those in the request cache."""
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

    def _verify(self, stride: int) -> None:
        """Searches with the queries of the next `stride` steps, keeps the steps that guessed right,
        and generates the one after them with the search's answer."""
        began = self.clock()
        self._in_flight = self._pending[:stride]
        self._pending = self._pending[stride:]
        queries = [speculated.query for speculated in self._in_flight]
        waits = len(queries) < stride and not self.text.finished
        if waits:
            queries.append(self._query())
        wide = self.speculation.prefetch_searches == "all"
        count = max(self.k, self.speculation.prefetch if wide else 1)
        search = self.retriever.begin(queries, count)
        guess = self._speculate_meanwhile(search, waits)
        self.guessing = False
        busy_seconds = self.clock() - began
        truths, search_seconds = self._finish(search)
        self.stats.strides.append(len(queries))
        self.scheduler.measured.record_search(len(queries), search_seconds, busy_seconds)
        self._fill_cache(truths)
        truths = [truth.first(self.k) for truth in truths]
        reached = len(self._in_flight)
        right = self._keep_right(truths)
        overhead = self.clock() - began - max(busy_seconds, search_seconds)
        self.scheduler.measured.overheads.append(max(overhead, 0.0))
        if right < len(truths):
            step = self._take(truths[right])
            if guess is not None and right == reached:
                reached += 1
                right += self.text.agrees(step, guess)
        if reached:
            self.scheduler.record(right, right < reached)

    def _speculate_meanwhile(self, search: RunningSearch, waits: bool) -> Retrieved | None:
        """Speculates the steps that pay while a search runs; the first one `waits` for it. If not
        even that one pays, returns the guess for it, to learn from."""
        while (
            not search.answer.done()
            and not self.text.finished
            and self.scheduler.one_more_pays(
                len(search.queries),
                len(self._in_flight) + len(self._pending),
                elapsed=self.clock() - search.began,
            )
        ):
            if waits:
                self._in_flight.append(self._speculate(search.queries[-1], meanwhile=True))
                waits = False
            else:
                self._pending.append(self._speculate(self._query(), meanwhile=True))
        if waits and self.scheduler.learning_pays:
            return self._guess(search.queries[-1])
        return None

    def _keep_right(self, truths: list[Retrieved]) -> int:
        """Commits the steps before the first wrong one, and undoes it and all later ones. Returns
        the number of the right ones."""
        verified = self._in_flight
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
        self._in_flight = verified[right:]
        if self._in_flight:
            self.text.roll_back(verified[right].step)
            stats.mismatched += 1
            stats.discarded += len(self._in_flight) - 1 + len(self._pending)
            self._in_flight.clear()
            self._pending.clear()
        return right


def check_ralm_call(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    stats: Any,
    caller: str,
) -> None:
    """Refuses calls that `caller` cannot serve, by the arguments that `generate` has prepared."""
    if stats is not None and not isinstance(stats, RalmStats):
        raise TypeError(
            f"`ralm_stats` must be a `hf_refspec.RalmStats()` or None, but is {stats!r}."
        )
    check_model(model, caller)
    check_request(input_ids, generation_config, model_kwargs, caller)
    if len(input_ids) != 1:
        raise ValueError(
            f"`{caller}` continues one text, but `input_ids` has {len(input_ids)} rows. Pass one "
            "prompt at a time."
        )


def generate_row(
    text: RetrievalAugmentedGeneration,
    row: Row,
    retriever: Retriever,
    speculation: RalmSpeculation | None,
    k: int,
    stats: RalmStats | None,
    streamer: BaseStreamer | None,
    neighbours: Callable[[np.ndarray], np.ndarray] | None = None,
) -> None:
    """Generates a text; a `RalmError` carries the verified part of the row."""
    if streamer is not None:
        streamer.put(row.ids.cpu())
    try:
        on_cpu = row.ids.device.type == "cpu"
        generate_with_retrieval(
            text=text,
            retriever=retriever,
            speculation=speculation,
            k=k,
            neighbours=neighbours,
            stats=stats,
            model_threads=torch.get_num_threads() if on_cpu else 1,
        )
    except RalmError as error:
        error.text_ids = row.ids[0].tolist()
        raise
    if streamer is not None:
        streamer.end()
