"""Sparse retrieval: BM25 over tokens, with an index by bm25s (arXiv 2407.03618)."""

# mypy: disallow-untyped-defs=False
# The types of a kernel's arguments are those of its numba signatures.

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from ..index.kernels import kernel
from .knowledge_base import KnowledgeBase
from .retrieved import Retrieved
from .simd import add_scaled_row, side_by_side

# Passages that are scored together: their scores stay in the fastest memory.
_PASSAGES_AT_ONCE = 512
_TOGETHER = 8  # queries whose scores lie side by side


@dataclass(frozen=True, slots=True, eq=False)
class SparseQuery:
    """The tokens of a query, each once.

    Attributes:
        tokens (`np.ndarray`, int64 of shape `(n,)`): Ascending.
        counts (`np.ndarray`, float32 of shape `(n,)`): How often each is there.
    """

    tokens: np.ndarray
    counts: np.ndarray


@kernel(
    "void(float32[::1], int32[::1], int64[::1], int64[::1], float32[:, ::1], int64, int64, "
    "float32[:, ::1], int64[:, ::1])",
    drafts=False,
)
def bm25_search(weights, passages, bounds, tokens, counts, number, block, scores, ids):
    """Finds the best passages of each query; of two with the same score the lower id.

    Every list is walked once for all queries. A passage's score is summed in the order of the
    tokens, as in `bm25_scores`: what a query finds does not depend on the batch.

    Args:
        weights (float32 of shape `(postings,)`): What a token adds to a passage's score.
        passages (int32 of shape `(postings,)`): To which passage, ascending for each token.
        bounds (int64 of shape `(vocabulary + 1,)`): Where the list of each token begins.
        tokens (int64 of shape `(t,)`): Of all queries, ascending.
        counts (float32 of shape `(q, t)`): How often each query has each of them.
        number (int): Of all passages.
        block (int): How many of them to score at a time.
        scores (float32 of shape `(q, k)`): Gets the scores, the best first.
        ids (int64 of shape `(q, k)`): Gets the passages.
    """
    scores[:] = -1  # no score is below 0
    at = np.empty(len(tokens), np.int64)
    for t in range(len(tokens)):
        at[t] = bounds[tokens[t]]
    grouped = side_by_side(counts, _TOGETHER)
    sums = np.empty((len(grouped), block, _TOGETHER), np.float32)
    for begin in range(0, number, block):
        end = min(begin + block, number)
        sums[:] = 0
        for t in range(len(tokens)):
            last = bounds[tokens[t] + 1]
            j = at[t]
            while j < last and passages[j] < end:
                for group in range(len(grouped)):
                    add_scaled_row(sums[group], passages[j] - begin, weights[j], grouped[group], t)
                j += 1
            at[t] = j
        for group in range(len(grouped)):
            largest = _largest_of_each(sums[group, : end - begin])
            for q in range(group * _TOGETHER, min((group + 1) * _TOGETHER, len(counts))):
                if largest[q % _TOGETHER] > scores[q, -1]:
                    _keep_best(sums[group, : end - begin, q % _TOGETHER], begin, scores[q], ids[q])


@njit(nogil=True)
def _largest_of_each(sums):
    """The largest sum of each query, `(8,)`."""
    largest = sums[0].copy()
    for row in range(1, len(sums)):
        for q in range(_TOGETHER):
            largest[q] = max(largest[q], sums[row, q])
    return largest


@njit(nogil=True)
def _keep_best(new_scores, begin, scores, ids):
    """Sorts new scores, those of the passages from `begin` on, in among the best so far."""
    for row in range(len(new_scores)):
        place = len(scores)
        while place > 0 and new_scores[row] > scores[place - 1]:
            place -= 1
        if place < len(scores):
            scores[place + 1 :] = scores[place:-1].copy()
            ids[place + 1 :] = ids[place:-1].copy()
            scores[place], ids[place] = new_scores[row], begin + row


@kernel(
    "void(float32[::1], int32[::1], int64[::1], int64[::1], float32[::1], int64[::1],float32[::1])",
    drafts=False,
)
def bm25_scores(weights, passages, bounds, tokens, counts, ids, scores):
    """The scores of some passages for one query; arguments as of `bm25_search`.

    Args:
        counts (float32 of shape `(t,)`): How often the query has each token.
        ids (int64 of shape `(m,)`): The passages; they are not checked.
        scores (float32 of shape `(m,)`): Gets the scores.
    """
    scores[:] = 0
    for t in range(len(tokens)):
        begin, end = bounds[tokens[t]], bounds[tokens[t] + 1]
        for i in range(len(ids)):
            low, high = begin, end
            while low < high:
                middle = (low + high) // 2
                if passages[middle] < ids[i]:
                    low = middle + 1
                else:
                    high = middle
            if low < end and passages[low] == ids[i]:
                scores[i] += counts[t] * weights[low]


class SparseRetriever:
    """Finds passages by BM25 (Lucene's form, k1 = 1.5, b = 0.75).

    The words are the tokens of the language model: nothing is split, stemmed or left out, a common
    token weighs little by itself. A query is the last tokens as they are. bm25s builds the index,
    which is searched here, a batch of queries at once and with ties broken by id. The queries of a
    verification have most of their tokens in common, so that it takes little longer than one.

    Args:
        knowledge_base ([`KnowledgeBase`]): What is searched; it needs no embeddings.
        progress (`bool`, *optional*, defaults to `True`): Show progress bars while indexing, on
            a terminal.

    Raises:
        ImportError: If bm25s is not installed (extra `retrieval`).
    """

    def __init__(self, knowledge_base: KnowledgeBase, progress: bool = True) -> None:
        bm25s = _import_bm25s()
        self.knowledge_base = knowledge_base
        vocabulary = range(knowledge_base.config.vocab_size)
        passages: Any = _Passages(knowledge_base)
        postings = bm25s.BM25(method="lucene", csc_backend="numpy").build_index_from_ids(
            vocabulary, passages, show_progress=progress and sys.stderr.isatty()
        )
        self._weights = np.ascontiguousarray(postings["data"], np.float32)
        self._passages = np.ascontiguousarray(postings["indices"], np.int32)
        self._bounds = np.ascontiguousarray(postings["indptr"], np.int64)

    def encode(self, token_ids: np.ndarray) -> SparseQuery:
        """Counts the last tokens of a text (int64 of shape `(n,)`)."""
        ids = np.asarray(token_ids, np.int64)
        known = ids[(ids >= 0) & (ids < self.knowledge_base.config.vocab_size)]
        tokens, counts = np.unique(known, return_counts=True)
        return SparseQuery(tokens, counts.astype(np.float32))

    def search(self, queries: Sequence[SparseQuery], k: int) -> list[Retrieved]:
        """The `k` best passages for each query, all queries at once."""
        if len(queries) == 0:
            return []
        tokens = np.unique(np.concatenate([query.tokens for query in queries]))
        counts = np.zeros((len(queries), len(tokens)), np.float32)
        for row, query in zip(counts, queries, strict=True):
            row[np.searchsorted(tokens, query.tokens)] = query.counts
        shape = len(queries), min(k, len(self.knowledge_base))
        scores, ids = np.empty(shape, np.float32), np.empty(shape, np.int64)
        bm25_search(
            *(self._weights, self._passages, self._bounds),
            *(tokens, counts, len(self.knowledge_base), _PASSAGES_AT_ONCE),
            *(scores, ids),
        )
        return [Retrieved(*each) for each in zip(ids, scores, strict=True)]

    def score(self, query: SparseQuery, ids: np.ndarray) -> np.ndarray:
        """The scores of some passages, float32 of shape `(n,)`; 0 where there is none such."""
        scores = np.empty(len(ids), np.float32)
        bm25_scores(
            *(self._weights, self._passages, self._bounds),
            *(query.tokens, query.counts, ids, scores),
        )
        return scores

    def passage(self, passage_id: int) -> np.ndarray:
        """The tokens (int64) of a passage."""
        return self.knowledge_base.passage(passage_id)


class _Passages:
    """The passages as bm25s takes them, one after another: all lists at once would be too much."""

    def __init__(self, knowledge_base: KnowledgeBase) -> None:
        self._knowledge_base = knowledge_base

    def __len__(self) -> int:
        return len(self._knowledge_base)

    def __iter__(self) -> Iterator[list[int]]:
        for passage_id in range(len(self)):
            yield self._knowledge_base.passage(passage_id).tolist()


def _import_bm25s() -> Any:
    try:
        import bm25s
    except ImportError:
        raise ImportError(
            'SparseRetriever needs bm25s: pip install "hf_refspec[retrieval]"'
        ) from None
    return bm25s
