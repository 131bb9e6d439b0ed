"""Sparse retrieval: BM25 over tokens, with an index that bm25s builds (arXiv 2407.03618)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from ..kernels.kernel import kernel
from ..messages import require
from .knowledge_base import KnowledgeBase
from .retriever import Retrieved

# Passages scored together, few enough that their scores stay in the first-level cache.
_PASSAGES_AT_ONCE = 512


@dataclass(frozen=True, slots=True, eq=False)
class SparseQuery:
    """The distinct tokens of a query."""

    tokens: np.ndarray  # int64 of shape (n,), ascending
    counts: np.ndarray  # float32 of shape (n,): how often each occurs


@kernel(
    "void(float32[::1], int32[::1], int64[::1], int64[::1], float32[:, ::1], int64, "
    "float32[:, ::1], int64[:, ::1])",
    drafts=False,
)
def bm25_search(weights, passages, bounds, tokens, counts, number, scores, ids):
    """Finds the best passages for each query, the lower id first where scores are equal.

    A passage's score is summed in the order of the tokens, as in `SparseRetriever.score`, so that
    it does not depend on the batch.

    `passages[bounds[t] : bounds[t + 1]]` are the passages with token t, ascending and below
    `number`; it adds the `weights` at the same places to their scores. `tokens` (t,) has the
    tokens of all queries, ascending, and `counts` (t, q) how often each query has them. `scores`
    and `ids` (q, k) receive the passages found, the best first."""
    scores[:] = -1  # no score is below 0
    at = bounds[tokens]
    sums = np.empty((_PASSAGES_AT_ONCE, len(scores)), np.float32)
    for begin in range(0, number, _PASSAGES_AT_ONCE):
        end = min(begin + _PASSAGES_AT_ONCE, number)
        sums[:] = 0
        for t in range(len(tokens)):
            last = bounds[tokens[t] + 1]
            while at[t] < last and passages[at[t]] < end:
                row = passages[at[t]] - begin
                weight = weights[at[t]]
                for q in range(len(scores)):
                    sums[row, q] += counts[t, q] * weight
                at[t] += 1
        for row in range(end - begin):
            for q in range(len(scores)):
                if sums[row, q] > scores[q, -1]:
                    _insert(sums[row, q], begin + row, scores[q], ids[q])


@njit(nogil=True)
def _insert(score, passage, scores, ids):
    """Inserts a passage into the best so far (k,), after others with the same score."""
    place = len(scores) - 1
    while place > 0 and score > scores[place - 1]:
        scores[place], ids[place] = scores[place - 1], ids[place - 1]
        place -= 1
    scores[place], ids[place] = score, passage


class SparseRetriever:
    """Finds passages by BM25 (Lucene's form, k1 = 1.5, b = 0.75; RaLMSpec's is Pyserini's).

    Words are the language model's tokens, without stemming or stop words. bm25s builds the index,
    and a kernel searches it, ties broken by id. A batch takes as long as its queries one by one.

    Args:
        knowledge_base ([`KnowledgeBase`]): The passages to search; it needs no embeddings.
        progress (`bool`, *optional*, defaults to `True`): Show progress bars while indexing, on
            a terminal.

    Raises:
        ImportError: If bm25s is not installed (extra `retrieval`).
    """

    search_threads = 1

    def __init__(self, knowledge_base: KnowledgeBase, progress: bool = True) -> None:
        bm25s = require("bm25s", "SparseRetriever", "retrieval")
        self.knowledge_base = knowledge_base
        vocabulary = range(knowledge_base.config.vocab_size)
        passages: Any = _Passages(knowledge_base)
        postings = bm25s.BM25(method="lucene", csc_backend="numpy").build_index_from_ids(
            vocabulary, passages, show_progress=progress and sys.stderr.isatty()
        )
        self._weights = np.ascontiguousarray(postings["data"], np.float32)
        self._passages = np.ascontiguousarray(postings["indices"], np.int32)
        self._bounds = np.ascontiguousarray(postings["indptr"], np.int64)
        bm25_search.compile()

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
        counts = np.zeros((len(tokens), len(queries)), np.float32)
        for column, query in zip(counts.T, queries, strict=True):
            column[np.searchsorted(tokens, query.tokens)] = query.counts
        number = len(self.knowledge_base)
        shape = len(queries), min(k, number)
        scores = np.empty(shape, np.float32)
        ids = np.empty(shape, np.int64)
        bm25_search(
            self._weights, self._passages, self._bounds, tokens, counts, number, scores, ids
        )
        return [Retrieved(*found) for found in zip(ids, scores, strict=True)]

    def score(self, query: SparseQuery, ids: np.ndarray) -> np.ndarray:
        """The scores (float32, `(n,)`) of the passages `ids` (int64, `(n,)`); 0 for unknown ids."""
        ids = ids.astype(np.int32)
        scores = np.zeros(len(ids), np.float32)
        for token, count in zip(query.tokens, query.counts, strict=True):
            begin, end = self._bounds[token : token + 2]
            places = begin + np.searchsorted(self._passages[begin:end], ids)
            found = np.flatnonzero(places < end)
            found = found[self._passages[places[found]] == ids[found]]
            scores[found] += count * self._weights[places[found]]
        return scores

    def passage(self, passage_id: int) -> np.ndarray:
        """The tokens (int64) of a passage."""
        return self.knowledge_base.passage(passage_id)


@dataclass
class _Passages:
    """The passages for bm25s, read one after another: they may not fit into memory."""

    knowledge_base: KnowledgeBase

    def __len__(self) -> int:
        return len(self.knowledge_base)

    def __iter__(self) -> Iterator[list[int]]:
        for passage_id in range(len(self)):
            yield self.knowledge_base.passage(passage_id).tolist()
