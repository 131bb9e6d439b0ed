"""The protocol of retrievers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from .retrieved import Retrieved


@runtime_checkable
class Retriever(Protocol):
    """Finds passages: any object with these methods.

    A query is what `encode` returns. It must find the same passages with the same scores whatever
    else is in the batch: the request cache predicts by `score` what `search` would find (RaLMSpec,
    arXiv 2401.14021, section 3).

    What speculation learns of a retriever, the time of its searches and how often guesses are
    right, is kept in its `__dict__` for the next call; without one, each call starts afresh.
    """

    def encode(self, token_ids: np.ndarray) -> Any:
        """Returns a query for the last tokens of a text (int64 of shape `(n,)`)."""

    def search(self, queries: Sequence[Any], k: int) -> list[Retrieved]:
        """The `k` best passages for each query, fewer where there are no more.

        It is called from another thread than `encode` and `score`, concurrently.
        """

    def score(self, query: Any, ids: np.ndarray) -> np.ndarray:
        """The scores (float32 of shape `(n,)`) that the passages `ids` have in `search`."""

    def passage(self, passage_id: int) -> np.ndarray:
        """The tokens (int64) of a passage."""
