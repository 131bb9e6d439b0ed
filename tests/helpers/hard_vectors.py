"""Vectors that an index may confuse, or that are hard to round."""

import numpy as np

# Vectors that are hard to round: a column or a row larger than all others, a constant column, all
# far from the origin, all equal, the least and largest numbers whose squares are float32, numbers
# whose products are too small for it, and some that are nearly so themselves.
HARD = ["usual", "column", "row", "constant", "far", "equal", "small", "large", "tiny", "denormal"]
_SCALES = {"small": 1e-15, "large": 1e15, "tiny": 1e-22, "denormal": 1e-40}


def hard_vectors(kind: str, n: int, d: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Vectors, and queries near some of them."""
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((n, d), dtype=np.float32)
    if kind == "column":
        vectors[:, 0] *= 1000
    elif kind == "row":
        vectors[0] *= 1000
    elif kind == "constant":
        vectors[:, -1] = 7
    elif kind == "far":
        vectors = vectors * np.float32(0.01) + 100
    elif kind == "equal":
        vectors[:] = vectors[0]
    vectors *= np.float32(_SCALES.get(kind, 1.0))
    near = vectors[rng.integers(0, n, 5)]
    return vectors, near * rng.uniform(0.9, 1.1, (5, 1)).astype(np.float32)
