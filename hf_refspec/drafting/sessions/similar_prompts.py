"""The sessions whose prompts are most similar to a prompt, by the tokens that they have in common.

For sessions as references (LLMA, arXiv 2304.04487, section 2.3). The set of tokens finds the same
sessions as the mean of the model's input embeddings or a sentence encoder, and needs neither.
"""

from __future__ import annotations

import numpy as np

# 1 KB a session. Prompts that share nothing have a cosine of 0, give or take 1 / sqrt(256).
_DIMENSIONS = 256
# Knuth's multiplicative hash: 2**64 divided by the golden ratio.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def signature(prompt: np.ndarray) -> np.ndarray:
    """Hashes the set of a prompt's tokens into a vector of length 1.

    Feature hashing (arXiv 0902.2206): the inner product of two, each float32 of shape `(256,)`, is
    about the cosine of their prompts' sets of tokens; the vector of an empty prompt is 0.
    """
    hashed = np.unique(prompt).astype(np.uint64) * _MULTIPLIER
    places = (hashed >> np.uint64(56)).astype(np.int64)
    signs = np.where(hashed >> np.uint64(32) & np.uint64(1), 1.0, -1.0)
    vector = np.bincount(places, weights=signs, minlength=_DIMENSIONS)
    return (vector / (np.linalg.norm(vector) or 1.0)).astype(np.float32)


class SimilarPrompts:
    """The signatures of the prompts of sessions, which are numbered in the order they came in.

    Args:
        first (`int`): The number of the first session that will be added.
    """

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._count = 0
        self._signatures = np.empty((0, _DIMENSIONS), dtype=np.float32)

    def add(self, prompt: np.ndarray) -> None:
        """Adds the prompt of the next session."""
        if self._count == len(self._signatures):
            room = np.empty((self._count + 1, _DIMENSIONS), dtype=np.float32)
            self._signatures = np.concatenate((self._signatures, room))
        self._signatures[self._count] = signature(prompt)
        self._count += 1

    def forget(self, oldest: int) -> None:
        """Frees the memory of sessions before the number `oldest` once they are half of all."""
        forgotten = oldest - self._first
        if 2 * forgotten > self._count:
            self._signatures = self._signatures[forgotten : self._count].copy()
            self._first, self._count = oldest, self._count - forgotten

    def search(self, prompt: np.ndarray, oldest: int, count: int) -> list[int]:
        """The numbers of at most `count` sessions from `oldest` on, the most similar one last.

        Of equally similar ones the newer is later.
        """
        signatures = self._signatures[oldest - self._first : self._count]
        similarities = signatures @ signature(prompt)
        best = np.argsort(similarities, kind="stable")[-count:]
        return (oldest + best).tolist()
