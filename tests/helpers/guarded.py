"""Arrays for kernels that run as plain Python and must not leave them."""

import numpy as np
from hypothesis import strategies as st


class Guarded(np.ndarray):
    """An array that may not be read or written outside, nor from its end."""

    def __getitem__(self, index):
        self._check(index)
        return super().__getitem__(index)

    def __setitem__(self, index, value):
        self._check(index)
        super().__setitem__(index, value)

    def _check(self, index):
        for i in index if isinstance(index, tuple) else (index,):
            assert isinstance(i, slice) or i >= 0


def guarded(values, dtype) -> np.ndarray:
    return np.array(values, dtype).view(Guarded)


def guarded_arrays(elements, dtype, size) -> st.SearchStrategy[np.ndarray]:
    return st.lists(elements, min_size=size, max_size=size).map(
        lambda values: guarded(values, dtype)
    )
