"""Passages from Milvus, an embedded file or a server, for `rs.iterative_ralm`.

pip install pymilvus milvus-lite
python examples/milvus_retriever.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence

import numpy as np
from pymilvus import MilvusClient
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_refspec as rs

TEXTS = [
    "Tides are caused by the moon. Its pull raises the sea on both sides of the earth.",
    "Spring tides come at new moon and at full moon, when sun and moon pull together.",
    "Earthquakes come where plates of the crust slide past each other.",
]
SPARE = 16  # passages beyond the k best that are ranked again


class MilvusRetriever:
    """Milvus holds ids and embeddings, and the texts stay in the knowledge base. As it may round
    scores differently from one batch to the next, its results are ranked by `score`, with which the
    request cache predicts them."""

    def __init__(self, base: rs.KnowledgeBase, encoder: Callable, uri: str) -> None:
        self.base, self.encoder, self.client = base, encoder, MilvusClient(uri)
        if self.client.has_collection("passages"):  # filled before
            return
        dimension = base.embeddings.shape[1]
        self.client.create_collection("passages", dimension=dimension, metric_type="IP")
        for i, row in enumerate(base.embeddings):  # insert thousands at once if you have many
            self.client.insert("passages", {"id": i, "vector": row})

    def encode(self, token_ids: np.ndarray) -> np.ndarray:
        text = self.base.tokenizer.decode(token_ids, skip_special_tokens=True)
        return np.asarray(self.encoder([text])[0], np.float32)

    def search(self, queries: Sequence[np.ndarray], k: int) -> list[rs.Retrieved]:
        options = {"limit": k + SPARE, "consistency_level": "Strong"}
        answers = self.client.search("passages", list(queries), **options) if queries else []
        found = [np.array([hit["id"] for hit in answer], np.int64) for answer in answers]
        pairs = zip(queries, found, strict=True)
        return [rs.Retrieved.best(ids, self.score(query, ids), k) for query, ids in pairs]

    def score(self, query: np.ndarray, ids: np.ndarray) -> np.ndarray:
        return np.einsum("nd,d->n", self.base.embeddings[ids], query)

    def passage(self, passage_id: int) -> np.ndarray:
        return self.base.passage(passage_id)


def letters(texts: list[str]) -> np.ndarray:
    """Stands in for a model of sentence-transformers: counts how often each letter occurs."""
    counts = [[text.lower().count(chr(97 + i)) for i in range(26)] for text in texts]
    return np.array(counts, np.float32)


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(rs.default_model(), dtype="float32")
    tok = AutoTokenizer.from_pretrained(rs.default_model())
    with tempfile.TemporaryDirectory() as folder:
        base = rs.KnowledgeBase.build(TEXTS, tok, letters, f"{folder}/base", progress=False)
        retriever = MilvusRetriever(base, letters, f"{folder}/passages.db")
        inputs = tok("The tides of the sea are caused by", return_tensors="pt")
        options = {"retriever": retriever, "tokenizer": tok, "max_new_tokens": 16}
        options |= {"custom_generate": rs.iterative_ralm, "do_sample": False}
        waiting = model.generate(**inputs, **options, speculation=None)
        speculative = model.generate(**inputs, **options)
    print(tok.decode(speculative[0]))
    print("the same:", waiting.equal(speculative))


if __name__ == "__main__":
    main()
