"""What a retriever is: the protocol that speculation relies on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from .retrieved import Retrieved


@runtime_checkable
class Retriever(Protocol):
    """Finds passages. Anything that has these methods will do.

    A query is whatever `encode` returns and `search` and `score` take. The same query must find the
    same passages with the same scores whatever else is in the batch: the request cache decides by
    `score` what `search` would have found (RaLMSpec, arXiv 2401.14021, section 3).

    What speculation learns of a retriever from one call to the next, how long its searches take and
    how often guesses at them are right, is kept in the retriever object itself (as an entry of its
    `__dict__`; one that has none starts afresh with each call).
    """

    def encode(self, token_ids: np.ndarray) -> Any:
        """Makes a query of the last tokens of a text (int64 of shape `(n,)`)."""

    def search(self, queries: Sequence[Any], k: int) -> list[Retrieved]:
        """The `k` best passages for each query, fewer where there are no more.

        It is called from another thread than `encode` and `score`, and at the same time.
        """

    def score(self, query: Any, ids: np.ndarray) -> np.ndarray:
        """The scores (float32 of shape `(n,)`) that the passages `ids` have in `search`."""

    def passage(self, passage_id: int) -> np.ndarray:
        """The tokens (int64) of a passage."""
