"""Passages from any retriever of LangChain for `rs.iterative_ralm`.

pip install langchain-core
python examples/langchain_retriever.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

import hf_refspec as rs

TEXTS = [
    "Tides are caused by the moon. Its pull raises the sea on both sides of the earth.",
    "Spring tides come at new moon and at full moon, when sun and moon pull together.",
    "Earthquakes come where plates of the crust slide past each other.",
]


class LangChainRetriever:
    """LangChain returns neither ids nor scores: an id is a hash of the passage's text, and a score
    is one divided by its rank. `score` guesses how LangChain would rank passages of the request
    cache by the tokens that they share with the query; a wrong guess costs a correction, and the
    output is the same."""

    def __init__(self, retriever: BaseRetriever, tokenizer: PreTrainedTokenizerBase) -> None:
        self.retriever, self.tokenizer = retriever, tokenizer
        self.passages: dict[int, np.ndarray] = {}  # all that were found

    def encode(self, token_ids: np.ndarray) -> np.ndarray:
        return token_ids

    def search(self, queries: Sequence[np.ndarray], k: int) -> list[rs.Retrieved]:
        texts = [self.tokenizer.decode(query, skip_special_tokens=True) for query in queries]
        return [self._retrieved(documents, k) for documents in self.retriever.batch(texts)]

    def _retrieved(self, documents: Sequence, k: int) -> rs.Retrieved:
        found = []
        for text in dict.fromkeys(document.page_content for document in documents):
            if tokens := self.tokenizer(text, add_special_tokens=False)["input_ids"]:
                digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
                found.append(int.from_bytes(digest, "little"))
                self.passages[found[-1]] = np.array(tokens, np.int64)
        ids = np.array(found[:k], np.int64)
        return rs.Retrieved(ids, (1 / np.arange(1, len(ids) + 1)).astype(np.float32))

    def score(self, query: np.ndarray, ids: np.ndarray) -> np.ndarray:
        passages = [self.passages[i] for i in ids.tolist()]
        shared = [len(np.intersect1d(query, each)) / len(each) ** 0.5 for each in passages]
        return np.array(shared, np.float32)

    def passage(self, passage_id: int) -> np.ndarray:
        return self.passages[int(passage_id)]


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(rs.default_model(), dtype="float32")
    tok = AutoTokenizer.from_pretrained(rs.default_model())
    # For real use: embeddings that mean something, and search_kwargs={"k": 20} for speculation.
    store = InMemoryVectorStore.from_texts(TEXTS, DeterministicFakeEmbedding(size=16))
    retriever = LangChainRetriever(store.as_retriever(), tok)
    inputs = tok("The tides of the sea are caused by", return_tensors="pt")
    options = {"retriever": retriever, "tokenizer": tok, "max_new_tokens": 16}
    options |= {"custom_generate": rs.iterative_ralm, "do_sample": False}
    waiting = model.generate(**inputs, **options, speculation=None)
    speculative = model.generate(**inputs, **options)
    print(tok.decode(speculative[0]))
    print("the same:", waiting.equal(speculative))


if __name__ == "__main__":
    main()
