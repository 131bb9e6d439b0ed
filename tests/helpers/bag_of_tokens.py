"""A retriever without a library."""

import numpy as np

from hf_refspec.retrieval.retriever import Retrieved
from tests.helpers.architectures import VOCAB_SIZE


class BagOfTokens:
    """Exact retrieval by the mean of random embeddings of the last tokens."""

    def __init__(self, vocab_size: int = VOCAB_SIZE, passages: int = 60, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.passages = [rng.integers(3, vocab_size, rng.integers(5, 20)) for _ in range(passages)]
        self.embeddings = rng.standard_normal((vocab_size, 16)).astype(np.float32)
        self.vectors = np.stack([self.encode(passage) for passage in self.passages])

    def encode(self, token_ids):
        mean = self.embeddings[token_ids].mean(axis=0)
        return mean / np.linalg.norm(mean)

    def search(self, queries, k):
        ids = np.arange(len(self.passages))
        return [Retrieved.best(ids, self.score(query, ids), k) for query in queries]

    def score(self, query, ids):
        return (self.vectors[ids] * query).sum(axis=-1)  # the same in every batch

    def passage(self, passage_id):
        return self.passages[passage_id]
