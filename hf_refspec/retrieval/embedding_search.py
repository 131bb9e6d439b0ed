"""Search by the inner product of embeddings, whatever index finds the candidates."""

# mypy: disallow-untyped-defs=False
# The types of a kernel's arguments are those of its numba signatures.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numba import njit

from ..index.kernels import kernel
from ..index.nearest_rows import LEAST_WALKED, SPARE, UNIT_ROUNDOFF, fetch_row_ahead
from ..index.retrieved import Retrieved
from ..store.build.text_encoder import TextEncoder
from ..store.folder import DatastoreError
from ..store.knowledge_base import KnowledgeBase

Index: TypeAlias = Literal["flat", "hnsw"]

_ROWS_AT_ONCE = 1 << 16


# A sum may be taken in another order, so that it can be vectorised, but always in the same one.
@njit(fastmath={"reassoc", "contract", "nsz"}, nogil=True)
def _inner_product(row, query):
    total = np.float32(0)
    for j in range(len(query)):
        total += row[j] * query[j]
    return total


@kernel("void(float32[:, ::1], int64[::1], float32[::1], float32[::1])", drafts=False)
def inner_products(rows, ids, query, products):
    """The inner product of some rows with a query, the same whatever is asked beside it.

    Args:
        rows (float32 of shape `(n, d)`): All rows.
        ids (int64 of shape `(m,)`): Which of them; they are not checked.
        query (float32 of shape `(d,)`): The query.
        products (float32 of shape `(m,)`): Gets the products.
    """
    for i in range(len(ids)):
        fetch_row_ahead(rows, ids, i)
        products[i] = _inner_product(rows[ids[i]], query)


class EmbeddingSearch:
    """What retrievers by embeddings have in common.

    An index finds candidates, fast and with rounding errors that depend on what is asked beside a
    query. They are then scored by `inner_products` from the knowledge base's own embeddings, so
    that a search and the request cache give the same scores in the same order.

    Args:
        knowledge_base ([`KnowledgeBase`]): What is searched.
        encoder (callable or `SentenceTransformer`): The one that it was built with, see
            [`TextEncoder`].
        index (`"flat"` or `"hnsw"`): Exact or approximate.

    Raises:
        ValueError: If the index is neither, or the knowledge base has no embeddings.
        DatastoreError: If an embedding is not finite.
    """

    def __init__(self, knowledge_base: KnowledgeBase, encoder: Any, index: Index) -> None:
        if index not in get_args(Index):
            raise ValueError(f"index must be one of {get_args(Index)}, but is {index!r}")
        if knowledge_base.embeddings is None:
            raise ValueError(
                f"knowledge_base has no embeddings: {knowledge_base.path} was built with "
                "encoder=None; build it with one, or search it with SparseRetriever"
            )
        self.knowledge_base = knowledge_base
        self.index = index
        self._embeddings: np.ndarray = knowledge_base.embeddings
        self._encoder = TextEncoder(encoder)
        self._longest = _longest_row(knowledge_base, self._embeddings)
        # No index gives more candidates than that for a query.
        self._most_candidates = len(knowledge_base)

    def encode(self, token_ids: np.ndarray) -> np.ndarray:
        """The embedding of a text's last tokens (int64 of shape `(n,)`), float32 of shape `(d,)`.

        Raises:
            RuntimeError: If the encoder fails.
            ValueError: If it returns something else than a finite vector of the right dimension.
        """
        text = self.knowledge_base.tokenizer.decode(
            np.asarray(token_ids).tolist(),
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        return self._encoder.query(str(text), self._embeddings.shape[1])

    def search(self, queries: Sequence[np.ndarray], k: int) -> list[Retrieved]:
        """The `k` best passages for each query, all queries at once."""
        if len(queries) == 0:
            return []
        stacked = np.ascontiguousarray(np.stack(list(queries)), dtype=np.float32)
        if self.index == "flat":
            return self._exact(stacked, k, k + SPARE)
        return [found for found, _ in self._best(stacked, k, max(k, LEAST_WALKED))]

    def score(self, query: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """The inner products with some passages, float32 of shape `(n,)`.

        Raises:
            IndexError: If there is no such passage.
        """
        if len(ids) and not (ids.min() >= 0 and ids.max() < len(self.knowledge_base)):
            raise IndexError(
                f"ids are from {ids.min()} to {ids.max()}, but the knowledge base has "
                f"{len(self.knowledge_base)} passages"
            )
        products = np.empty(len(ids), dtype=np.float32)
        inner_products(self._embeddings, ids, query, products)
        return products

    def passage(self, passage_id: int) -> np.ndarray:
        """The tokens (int64) of a passage."""
        return self.knowledge_base.passage(passage_id)

    def _candidates(self, queries: np.ndarray, count: int) -> list[tuple[np.ndarray, float]]:
        """Asks the index.

        Args:
            queries (`np.ndarray`, float32 of shape `(q, d)`): What is searched for.
            count (`int`): Candidates of each query.

        Returns:
            For each query, ids (int64 of shape `(count,)` or fewer, in any order), and how large
            the product of a passage that is not among them can be, as the index sees it.
        """
        raise NotImplementedError

    def _best(self, queries: np.ndarray, k: int, count: int) -> list[tuple[Retrieved, float]]:
        """For each query the best of `count` candidates, and what no other passage exceeds."""
        candidates = self._candidates(queries, min(count, self._most_candidates))
        return [
            (Retrieved.best(ids, self.score(query, ids), k), bound)
            for query, (ids, bound) in zip(queries, candidates, strict=True)
        ]

    def _exact(self, queries: np.ndarray, k: int, count: int) -> list[Retrieved]:
        """Takes `count` candidates, and four times as many for those queries for which one that is
        as good as the k-th may still be missing."""
        best = self._best(queries, k, count)
        found = [each for each, _ in best]
        if count >= self._most_candidates:
            return found
        unsure = [
            i
            for i, (each, bound) in enumerate(best)
            if each.scores[k - 1] <= bound + self._rounding(queries[i])
        ]
        if unsure:
            again = self._exact(queries[unsure], k, 4 * count)
            for i, each in zip(unsure, again, strict=True):
                found[i] = each
        return found

    def _rounding(self, query: np.ndarray) -> float:
        """How far the index's product and ours of one passage can be apart: a sum of d products in
        any order is off by at most d roundings of the product of the lengths."""
        length = float(np.linalg.norm(query.astype(np.float64)))
        return 2 * (len(query) + 2) * UNIT_ROUNDOFF * length * self._longest


def _longest_row(knowledge_base: KnowledgeBase, embeddings: np.ndarray) -> float:
    """The length of the longest embedding; all are read, and must be finite."""
    longest = 0.0
    for begin in range(0, len(embeddings), _ROWS_AT_ONCE):
        some = embeddings[begin : begin + _ROWS_AT_ONCE]
        squares = np.einsum("ij,ij->i", some, some)
        bad = np.flatnonzero(~np.isfinite(squares))
        if len(bad):
            raise DatastoreError(
                f"the embedding of passage {begin + bad[0]} of {knowledge_base.path} is NaN or "
                "infinite; its files are damaged, build it again"
            )
        longest = max(longest, float(squares.max()))
    return longest**0.5
