"""A product-quantised index: a few bits of each row, so that every step can look at all rows.

The request cache only knows what searches have brought before, and a kNN-LM often needs an entry
that none has. A search of the PQ index takes about a thirtieth of the time of an exact search, and
finds candidates among which the nearest nearly always are. Only guesses come from it, and every
guess is verified.

A row is approximated by its first principal components, each in four bits (FAISS's
`IndexPQFastScan`):

    mean    float32, of the rows
    axes    float32, the principal axes, one after the other
    levels  float32, the 16 values that the bits of each component stand for
    codes   uint8, two components in each
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..retrieval.hnsw import import_faiss
from ..store.files import DatastoreError, FileEntry, read_arrays, write_arrays

FILE = "pq_index.safetensors"
# A search through fewer rows is so fast that there is nothing to gain.
LEAST_ROWS = 1 << 16
MOST_AXES = 64
_BITS = 4
# Candidates for each row that is wanted, and in all at least: so few take no time to be scored.
_FOR_EACH, _LEAST_CANDIDATES = 4, 1024
_SAMPLE = 50_000
# From this dimension on there must be as many rows: their covariances take its square.
_WIDE = 4096
_ROWS_AT_ONCE = 1 << 16


class PQIndex:
    """The PQ index of some rows.

    Args:
        mean (`np.ndarray`, float32 of shape `(d,)`): See above, as all of these.
        axes (`np.ndarray`, float32 of shape `(a, d)`): Of an even number.
        levels (`np.ndarray`, float32 of shape `(a, 16)`).
        codes (`np.ndarray`, uint8 of shape `(n, a / 2)`).

    Raises:
        ImportError: If FAISS is not installed (extra `retrieval`).
    """

    def __init__(
        self, mean: np.ndarray, axes: np.ndarray, levels: np.ndarray, codes: np.ndarray
    ) -> None:
        self.mean, self.axes, self.levels, self.codes = mean, axes, levels, codes
        faiss = import_faiss("the PQ index of a datastore")
        quantizer = faiss.IndexPQ(len(axes), len(axes), _BITS)
        faiss.copy_array_to_vector(levels.reshape(-1), quantizer.pq.centroids)
        faiss.copy_array_to_vector(codes.reshape(-1), quantizer.codes)
        quantizer.ntotal, quantizer.is_trained = len(codes), True
        self._index = faiss.IndexPQFastScan(quantizer)

    def __len__(self) -> int:
        return len(self.codes)

    @classmethod
    def build(cls, rows: np.ndarray) -> PQIndex:
        """Builds the index of rows, float32 of shape `(n, d)`; raises as
        [`KnnDatastore.add_pq_index`]."""
        least = max(1 << _BITS, rows.shape[1] if rows.shape[1] > _WIDE else 0)
        if len(rows) < least or axes_of(rows.shape[1]) == 0:
            raise ValueError(
                f"a PQ index needs at least {least} rows of at least 2 numbers, but they are of "
                f"shape {rows.shape}"
            )
        faiss = import_faiss("the PQ index of a datastore")
        count = min(_SAMPLE, len(rows))
        chosen = np.random.default_rng(0).choice(len(rows), count, replace=False, shuffle=False)
        sample = rows[np.sort(chosen)]
        mean, axes = _principal_axes(sample)
        quantizer = faiss.IndexPQ(len(axes), len(axes), _BITS)
        quantizer.train(_components(sample, mean, axes))
        for begin in range(0, len(rows), _ROWS_AT_ONCE):
            quantizer.add(_components(rows[begin : begin + _ROWS_AT_ONCE], mean, axes))
        levels = faiss.vector_to_array(quantizer.pq.centroids).reshape(len(axes), 1 << _BITS)
        codes = faiss.vector_to_array(quantizer.codes).reshape(len(rows), len(axes) // 2)
        return cls(mean, axes, levels, codes)

    def candidates(self, query: np.ndarray, k: int) -> np.ndarray:
        """The ids (int64, in any order) of rows that may be the `k` nearest to a query, `(d,)`."""
        count = max(_FOR_EACH * k, _LEAST_CANDIDATES)
        components = _components(query[None], self.mean, self.axes)
        _, found = self._index.search(components, min(count, len(self)))
        return found[0, found[0] >= 0]

    def write(self, folder: Path) -> FileEntry:
        """Writes its file into a folder."""
        names = ("mean", "axes", "levels", "codes")
        return write_arrays(folder / FILE, {name: getattr(self, name).ravel() for name in names})

    @classmethod
    def read(cls, folder: Path, entry: FileEntry, shape: tuple[int, int]) -> PQIndex:
        """Reads the file of the index of rows of `shape`; raises as [`read_arrays`], and a
        DatastoreError if a number is not finite."""
        rows, dimension = shape
        axes = axes_of(dimension)
        number, bits = np.dtype(np.float32), np.dtype(np.uint8)
        arrays = read_arrays(
            folder,
            entry,
            {
                "mean": (number, dimension),
                "axes": (number, axes * dimension),
                "levels": (number, axes << _BITS),
                "codes": (bits, rows * axes // 2),
            },
        )
        for name in ("mean", "axes", "levels"):
            if not np.isfinite(arrays[name]).all():
                raise DatastoreError(f"{folder / entry.name} is damaged: {name} is not finite")
        return cls(
            arrays["mean"],
            arrays["axes"].reshape(axes, dimension),
            arrays["levels"].reshape(axes, -1),
            arrays["codes"].reshape(rows, -1),
        )


def axes_of(dimension: int) -> int:
    """How many principal axes the index of such rows has; 0 where there can be none."""
    return min(MOST_AXES, dimension) // 2 * 2


def _principal_axes(sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean, and the axes along which rows differ most, `(a, d)`."""
    mean = sample.mean(axis=0, dtype=np.float64)
    _, vectors = np.linalg.eigh(np.cov(sample, rowvar=False))  # by ascending variance
    axes = vectors[:, ::-1][:, : axes_of(sample.shape[1])].T
    return mean.astype(np.float32), np.ascontiguousarray(axes, dtype=np.float32)


def _components(rows: np.ndarray, mean: np.ndarray, axes: np.ndarray) -> Any:
    """Of rows, along the axes: float32 of shape `(n, a)`."""
    return np.ascontiguousarray((rows - mean) @ axes.T)
