"""Adapts retrievers of LangChain."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..store.fingerprint import check_fast
from ..store.tokenizer_file import load_backend
from .retrieved import Retrieved


@dataclass(frozen=True, slots=True, eq=False)
class TextQuery:
    """The last tokens of a text: the string that LangChain receives, and each token once."""

    text: str
    tokens: frozenset[int]


class LangChainRetriever:
    """A LangChain retriever with ids and scores; see [`from_langchain`].

    LangChain returns neither. A passage's id is a hash of its text. `search` scores by rank: 1,
    1/2, 1/3, ... The retriever's own ranking of passages in the request cache is unknown; `score`
    ranks them by the tokens that they share with the query. That only guesses at what the next
    search finds: a wrong guess costs a correction, the output is the same.

    Passages that were found are kept as long as this object lives.
    """

    def __init__(self, retriever: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self._retriever = retriever
        self._tokenizer = tokenizer
        self._backend = load_backend(tokenizer.backend_tokenizer.to_str())
        self._passages: dict[int, tuple[np.ndarray, frozenset[int]]] = {}  # tokens; each once
        self._lock = threading.Lock()

    def encode(self, token_ids: np.ndarray) -> TextQuery:
        """The text of the last tokens (int64 of shape `(n,)`)."""
        ids = np.asarray(token_ids).tolist()
        text = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return TextQuery(str(text), frozenset(ids))

    def search(self, queries: Sequence[TextQuery], k: int) -> list[Retrieved]:
        """The `k` best passages for each query, from one call of the retriever's `batch`; fewer if
        its own limit is lower."""
        if len(queries) == 0:
            return []
        answers = self._retriever.batch([query.text for query in queries])
        return [self._retrieved(documents, k) for documents in answers]

    def score(self, query: TextQuery, ids: np.ndarray) -> np.ndarray:
        """How much each passage resembles a query, float32 of shape `(n,)`: the fraction of its
        tokens that the query shares, rare ones counting more (`search` scores otherwise)."""
        return np.array(
            [_overlap(query.tokens, self._passages[passage_id][1]) for passage_id in ids.tolist()],
            dtype=np.float32,
        )

    def passage(self, passage_id: int) -> np.ndarray:
        """The tokens (int64) of a passage that was found before."""
        return self._passages[int(passage_id)][0]

    def _retrieved(self, documents: Sequence[Any], k: int) -> Retrieved:
        ids: dict[int, None] = {}  # each passage once, where it was found first
        for document in documents:
            passage_id = self._remember(document.page_content)
            if passage_id is not None:
                ids.setdefault(passage_id)
        found = np.array(list(ids), dtype=np.int64)[:k]
        return Retrieved(found, (1 / np.arange(1, len(found) + 1)).astype(np.float32))

    def _remember(self, text: str) -> int | None:
        """Keeps a passage and returns its id; `None` for one without a token."""
        digest = hashlib.blake2b(text.encode("utf-8", errors="replace"), digest_size=8).digest()
        passage_id = int.from_bytes(digest, "little") >> 1
        with self._lock:
            if passage_id not in self._passages:
                tokens = self._backend.encode(text, add_special_tokens=False).ids
                if not tokens:
                    return None
                self._passages[passage_id] = np.array(tokens, np.int64), frozenset(tokens)
        return passage_id


def _overlap(query: frozenset[int], passage: frozenset[int]) -> float:
    # Merging gives common tokens low ids.
    shared = sum(math.log2(2 + token) for token in query & passage)
    return shared / math.sqrt(len(passage))


def from_langchain(retriever: Any, tokenizer: PreTrainedTokenizerBase) -> LangChainRetriever:
    """Adapts a retriever of LangChain.

    Args:
        retriever (`langchain_core.retrievers.BaseRetriever`): It must return at least as many
            documents as a step needs; for speculation to pay, about 20 (`search_kwargs={"k": 20}`).
        tokenizer (`PreTrainedTokenizerBase`): The language model's, a fast one.

    Raises:
        TypeError: If it is no retriever.
        ValueError: If the tokenizer is not a fast one.
    """
    if isinstance(retriever, type) or not callable(getattr(retriever, "batch", None)):
        raise TypeError(
            "retriever must be a LangChain retriever, such as vector_store.as_retriever(), but is "
            f"{retriever!r}"
        )
    check_fast(tokenizer)
    return LangChainRetriever(retriever, tokenizer)
