"""Small texts and a small encoder, the same on every machine."""

import zlib
from functools import cache

import numpy as np

_WORDS = (
    "tree river stone light music bread winter engine garden letter mountain paper window market "
    "silver question harbour story copper village"
)
WORDS = _WORDS.split()
DIMENSION = 24


def bag_of_words(texts: list[str]) -> np.ndarray:
    """Makes the same vector of the same words in any order, float32 of shape `(n, DIMENSION)`."""
    vectors = np.zeros((len(texts), DIMENSION))
    for row, text in enumerate(texts):
        for word in text.split():
            vectors[row] += _vector(word)
    return vectors.astype(np.float32)


@cache
def _vector(word: str) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(word.encode())).normal(size=DIMENSION)


def some_texts(count: int, seed: int = 0, words: int = 6) -> list[str]:
    """Texts of random words, some of them twice."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, words)) for _ in range(count)]


TEXTS = some_texts(400)


def queries_of(retriever, texts: list[str]) -> list:
    """What a retriever searches for after each text."""
    tokenizer = retriever.knowledge_base.tokenizer
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [retriever.encode(np.array(each)) for each in ids]
