"""Retrievers of LangChain, made ones that can be speculated with."""

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
    """The last tokens of a text.

    Attributes:
        text (`str`): What the retriever gets.
        tokens (`frozenset[int]`): Each once.
    """

    text: str
    tokens: frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class _Passage:
    """A passage that a search has found.

    Attributes:
        tokens (`np.ndarray`, int64 of shape `(n,)`): Of the language model.
        words (`frozenset[int]`): Each token once.
    """

    tokens: np.ndarray
    words: frozenset[int]


class LangChainRetriever:
    """A LangChain retriever as one that can be speculated with; made by [`from_langchain`].

    LangChain returns no ids and no scores. A passage's id comes from its text: the same one in
    every process, whatever was found before. `search` scores by rank, the best with 1, then 1/2,
    1/3, ... How the retriever would rank passages that are in the request cache cannot be known;
    `score` ranks them by the tokens that they have in common with the query. It is only a guess at
    what the next search finds: a bad one costs a correction, the output is the same.

    What was found is kept for as long as this object lives.
    """

    def __init__(self, retriever: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self._retriever = retriever
        self._tokenizer = tokenizer
        self._backend = load_backend(tokenizer.backend_tokenizer.to_str())
        self._passages: dict[int, _Passage] = {}
        self._lock = threading.Lock()

    def encode(self, token_ids: np.ndarray) -> TextQuery:
        """The text of the last tokens (int64 of shape `(n,)`)."""
        ids = np.asarray(token_ids).tolist()
        text = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return TextQuery(str(text), frozenset(ids))

    def search(self, queries: Sequence[TextQuery], k: int) -> list[Retrieved]:
        """The `k` best passages for each query; all are given to the retriever's `batch` at once.

        A LangChain retriever has its own limit, which may be lower.
        """
        if len(queries) == 0:
            return []
        answers = self._retriever.batch([query.text for query in queries])
        return [self._retrieved(documents, k) for documents in answers]

    def score(self, query: TextQuery, ids: np.ndarray) -> np.ndarray:
        """How much each passage that was found before resembles a query, float32 of shape `(n,)`.

        It is the fraction of the passage's tokens that the query has as well, rare ones counting
        more (not what `search` scores by, see above).

        Raises:
            KeyError: If no search has found one of them.
        """
        return np.array(
            [self._overlap(query, self._passages[passage_id]) for passage_id in ids.tolist()],
            dtype=np.float32,
        )

    def passage(self, passage_id: int) -> np.ndarray:
        """The tokens (int64) of a passage that was found before.

        Raises:
            KeyError: If no search has found it.
        """
        return self._passages[int(passage_id)].tokens

    def _overlap(self, query: TextQuery, passage: _Passage) -> float:
        # In a vocabulary that is learnt by merging, the commoner a token the lower its id.
        shared = sum(math.log2(2 + token) for token in query.tokens & passage.words)
        return shared / math.sqrt(len(passage.words))

    def _retrieved(self, documents: Sequence[Any], k: int) -> Retrieved:
        ids: dict[int, None] = {}  # a passage that is found twice stands where it stood first
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
                self._passages[passage_id] = _Passage(np.array(tokens, np.int64), frozenset(tokens))
        return passage_id


def from_langchain(retriever: Any, tokenizer: PreTrainedTokenizerBase) -> LangChainRetriever:
    """Makes a retriever of one of LangChain's.

    Args:
        retriever (`langchain_core.retrievers.BaseRetriever`): It must give at least as many
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
