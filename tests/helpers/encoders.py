"""Encoders of texts for tests: how often each letter occurs. They stand for models of
sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def letters(dimension: int) -> Callable[[list[str]], np.ndarray]:
    def encode(texts: list[str], **options) -> np.ndarray:
        vectors = np.ones((len(texts), dimension), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            np.add.at(vector, np.frombuffer(text.encode(), np.uint8) % dimension, 1)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    return encode


def load_letters(name: str) -> Callable[[list[str]], np.ndarray]:
    """Stands in for `load_encoder`: "letters-8" has 8 dimensions."""
    kind, _, dimension = name.partition("-")
    if kind != "letters":
        raise ValueError(f"--encoder {name} cannot be loaded")
    return letters(int(dimension))
