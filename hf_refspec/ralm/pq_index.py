"""A product-quantised index: a few bits of each row, so that every step can search all rows.

The request cache only holds results of earlier searches, and a kNN-LM with few neighbours often
needs other entries. A search of the PQ index takes about a thirtieth of the time of an exact one,
and its candidates nearly always include the nearest rows. It only speculates: every guess is
verified.

A row is approximated by its first principal components, each in four bits (FAISS's
`IndexPQFastScan`):

    mean    float32, of the rows
    axes    float32, the principal axes
    levels  float32, the 16 values of each component's bits
    codes   uint8, two components in each
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..retrieval.vector_index import import_faiss
from ..store.files import DatastoreError, FileEntry, read_arrays, write_arrays

FILE = "pq_index.safetensors"
# An exact search of fewer rows is fast enough.
LEAST_ROWS = 1 << 16
MOST_AXES = 64
_BITS = 4
# Candidates for each requested row, and the least in all: scoring 1,024 takes no time.
_FOR_EACH, _LEAST_CANDIDATES = 4, 1024
_SAMPLE = 50_000
# From this dimension on there must be as many rows: the covariance matrix has its square.
_WIDE = 4096
_ROWS_AT_ONCE = 1 << 16


class PQIndex:
    """The PQ index of some rows: `mean`, `axes`, `levels` and `codes` are of the shapes `(d,)`,
    `(a, d)`, `(a, 16)` and `(n, a / 2)`, where a is even."""

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
        [`KnnDatastore.build`]."""
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
        mean = sample.mean(axis=0, dtype=np.float64).astype(np.float32)
        _, vectors = np.linalg.eigh(np.cov(sample, rowvar=False))  # by ascending variance
        axes = np.ascontiguousarray(vectors[:, ::-1][:, : axes_of(rows.shape[1])].T, np.float32)
        quantizer = faiss.IndexPQ(len(axes), len(axes), _BITS)
        quantizer.train(_components(sample, mean, axes))
        for begin in range(0, len(rows), _ROWS_AT_ONCE):
            quantizer.add(_components(rows[begin : begin + _ROWS_AT_ONCE], mean, axes))
        levels = faiss.vector_to_array(quantizer.pq.centroids).reshape(len(axes), 1 << _BITS)
        codes = faiss.vector_to_array(quantizer.codes).reshape(len(rows), len(axes) // 2)
        return cls(mean, axes, levels, codes)

    def candidates(self, query: np.ndarray, k: int) -> np.ndarray:
        """The ids (int64, in any order) of rows that include the likely `k` nearest to a query."""
        count = max(_FOR_EACH * k, _LEAST_CANDIDATES)
        components = _components(query[None], self.mean, self.axes)
        _, found = self._index.search(components, min(count, len(self)))
        return found[0, found[0] >= 0]

    def write(self, folder: Path) -> FileEntry:
        """Writes its file into a folder."""
        arrays = {"mean": self.mean, "axes": self.axes, "levels": self.levels, "codes": self.codes}
        return write_arrays(folder / FILE, arrays)

    @classmethod
    def read(cls, folder: Path, entry: FileEntry, shape: tuple[int, int]) -> PQIndex:
        """Reads the index of rows of `shape`; raises as [`read_arrays`], and a DatastoreError if a
        number is not finite."""
        rows, dimension = shape
        axes = axes_of(dimension)
        shapes = {
            "mean": (np.float32, dimension),
            "axes": (np.float32, (axes, dimension)),
            "levels": (np.float32, (axes, 1 << _BITS)),
            "codes": (np.uint8, (rows, axes // 2)),
        }
        arrays = read_arrays(folder, entry, shapes)
        for name in ("mean", "axes", "levels"):
            if not np.isfinite(arrays[name]).all():
                raise DatastoreError(f"{folder / entry.name} is damaged: {name} is not finite")
        return cls(**arrays)


def axes_of(dimension: int) -> int:
    """How many principal axes the index of rows of this dimension has; 0 if there can be none."""
    return min(MOST_AXES, dimension) // 2 * 2


def _components(rows: np.ndarray, mean: np.ndarray, axes: np.ndarray) -> Any:
    """The components of rows along the axes, float32 of shape `(n, a)`."""
    return np.ascontiguousarray((rows - mean) @ axes.T)
