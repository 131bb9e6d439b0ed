"""Searches in other threads, whose scores must be finite."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from ..retrieval.retriever import Retrieved, Retriever


class RalmError(RuntimeError):
    """The retriever failed, or returned an answer that cannot be ranked.

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
    """Searches in threads of its own, and checks that a step gets passages and finite scores.

    An answer with fewer than the `k` passages that a step needs is valid only if there are no more.
    The threads end with `close`, or when the retriever returns."""

    def __init__(self, retriever: Retriever, k: int) -> None:
        self._retriever = retriever
        self._name = type(retriever).__name__
        self._k = k
        self._most_found = 0  # by one search: the retriever has at least this number of passages
        self.concurrent_searches: int = getattr(retriever, "concurrent_searches", 1)
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

        def search() -> tuple[Any, float]:
            began = perf_counter()
            found = call(self._retriever, "search", queries, count)
            return found, perf_counter() - began

        answer = self._threads.submit(search)
        self._running.append(answer)
        return RunningSearch(queries, count, perf_counter(), answer)

    def finish(self, search: RunningSearch) -> tuple[list[Retrieved], float]:
        """Waits for a search; returns the passages for each query, and the search's seconds."""
        answers, seconds = search.answer.result()
        checked = [
            self._checked_answer(answer, search.count)
            for _, answer in zip(search.queries, answers, strict=True)
        ]
        self._most_found = max(self._most_found, *map(len, checked))
        fewest = min(map(len, checked))
        if fewest < min(self._k, self._most_found):
            raise RalmError(
                f"{self._name}.search returned {fewest} of the {self._k} passages that a step "
                f"needs, though there are {self._most_found} or more."
            )
        return checked, seconds

    def score(self, query: Any, ids: np.ndarray) -> np.ndarray:
        """The scores (float32, `(n,)`) that the passages `ids` (int64, `(n,)`) have in a search."""
        return self._finite("score", call(self._retriever, "score", query, ids))

    def _checked_answer(self, answer: Retrieved, count: int) -> Retrieved:
        ids, scores = np.asarray(answer.ids), self._finite("search", answer.scores)
        if len(ids) == 0:
            raise RalmError(f"{self._name}.search found no passage. Is its knowledge base empty?")
        return Retrieved(ids[:count].astype(np.int64, copy=False), scores[:count])

    def _finite(self, method: str, scores: Any) -> np.ndarray:
        scores = np.asarray(scores)
        if not np.isfinite(scores).all():
            raise RalmError(
                f"{self._name}.{method} returned scores that are not finite. Does an embedding, of "
                "a passage or of the query, have NaN?"
            )
        return scores
