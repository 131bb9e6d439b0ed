"""Searches in other threads; every answer of a retriever is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from ..messages import check_count
from ..retrieval.retriever import Retrieved, Retriever


class RalmError(RuntimeError):
    """The retriever failed, or returned an invalid answer.

    Attributes:
        text_ids (`list[int]`, *optional*): Prompt and output as far as they are verified.
    """

    text_ids: list[int] | None = None


def call(retriever: Retriever, method: str, *args: Any) -> Any:
    """Calls a retriever's method; if it fails, a `RalmError` names it."""
    try:
        return getattr(retriever, method)(*args)
    except Exception as error:
        raise RalmError(
            f"{type(retriever).__name__}.{method} raised {type(error).__name__}: {error}"
        ) from error


@dataclass(slots=True, eq=False)
class RunningSearch:
    """A search in another thread for the `count` best passages of each query."""

    queries: Sequence[Any]
    count: int
    began: float
    answer: Future[tuple[Any, float]]  # what the retriever returned, and its seconds


class CheckedRetriever:
    """Searches in threads of its own, and checks every answer.

    The threads end with `close`, or when the retriever returns. An answer with fewer than the `k`
    passages that a step needs is valid only if there are no more.
    """

    def __init__(
        self, retriever: Retriever, k: int, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._retriever = retriever
        self._name = type(retriever).__name__
        self._k = k
        self._clock = clock
        self._most_found = 0  # by one search: the retriever has at least this number of passages
        self.concurrent_searches: int = getattr(retriever, "concurrent_searches", 1)
        check_count(f"{self._name}.concurrent_searches", self.concurrent_searches)
        self._threads = ThreadPoolExecutor(self.concurrent_searches, "retrieval")
        self._running: list[Future[tuple[Any, float]]] = []

    def close(self) -> None:
        """Drops the searches that have not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def idle(self) -> int:
        """The number of further searches that may begin now; abandoned ones may still run."""
        self._running = [answer for answer in self._running if not answer.done()]
        return max(self.concurrent_searches - len(self._running), 0)

    def begin(self, queries: Sequence[Any], count: int) -> RunningSearch:
        """Begins a search for the `count` best passages of each query."""
        answer = self._threads.submit(self._search, queries, count)
        self._running.append(answer)
        return RunningSearch(queries, count, self._clock(), answer)

    def _search(self, queries: Sequence[Any], count: int) -> tuple[Any, float]:
        began = self._clock()
        found = call(self._retriever, "search", queries, count)
        return found, self._clock() - began

    def finish(self, search: RunningSearch) -> tuple[list[Retrieved], float]:
        """Waits for a search; returns the passages for each query, and the search's seconds."""
        answers, seconds = search.answer.result()
        try:
            checked = [self._checked_answer(answer, search.count) for answer in answers]
        except (AttributeError, TypeError):
            checked = []
        if len(checked) != len(search.queries):
            wanted = f"a list with a Retrieved for each of {len(search.queries)} queries"
            raise RalmError(
                f"{self._name}.search must return {wanted}, but returned {answers!r:.200}."
            )
        self._most_found = max(self._most_found, *map(len, checked))
        for answer in checked:
            if len(answer) < min(self._k, self._most_found):
                raise RalmError(
                    f"{self._name}.search returned {len(answer)} of the {self._k} passages that a "
                    f"step needs, though there are {self._most_found} or more."
                )
        return checked, seconds

    def score(self, query: Any, ids: np.ndarray) -> np.ndarray:
        """The scores (float32, `(n,)`) that the passages `ids` (int64, `(n,)`) have in a search."""
        scores = np.asarray(call(self._retriever, "score", query, ids))
        if scores.shape != ids.shape:
            returned = f"returned an array of shape {scores.shape}"
            raise RalmError(
                f"{self._name}.score was called with {len(ids)} passages, but {returned}."
            )
        self._check_finite("score", scores)
        return scores

    def _checked_answer(self, answer: Retrieved, count: int) -> Retrieved:
        ids, scores = np.asarray(answer.ids), np.asarray(answer.scores)
        problem = ""
        if ids.ndim != 1 or ids.shape != scores.shape:
            problem = f"returned ids of shape {ids.shape} and scores of shape {scores.shape}; both "
            problem += "must be one-dimensional and equally long."
        elif len(ids) == 0:
            problem = "found no passage for a query. Is its knowledge base empty?"
        elif not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0:
            problem = f"returned ids {ids[:5]} of dtype {ids.dtype}; they must be integers of at "
            problem += "least 0."
        elif len(np.unique(ids)) < len(ids):
            problem = f"returned the same passage twice: {ids[:20]}"
        if problem:
            raise RalmError(f"{self._name}.search {problem}")
        self._check_finite("search", scores)
        return Retrieved(ids[:count].astype(np.int64, copy=False), scores[:count])

    def _check_finite(self, method: str, scores: np.ndarray) -> None:
        if not np.isfinite(scores).all():
            raise RalmError(
                f"{self._name}.{method} returned scores that are not finite. Does an embedding, of "
                "a passage or of the query, have NaN?"
            )
