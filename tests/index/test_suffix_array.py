"""The order of a suffix array, against Python's own sorting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_refspec.index.suffix_array import build_suffix_array

UINT16 = 2**16 - 1
UINT32 = 2**32 - 1


def sorted_suffixes(tokens: np.ndarray) -> list[int]:
    text = tokens.tolist()
    return sorted(range(len(text)), key=lambda start: text[start:])


def texts(dtype: type, largest: int, separator: int) -> st.SearchStrategy[np.ndarray]:
    """Texts of few different tokens with bytes in common, so that many suffixes begin alike."""
    alphabet = st.lists(st.integers(0, largest), min_size=1, max_size=3).flatmap(
        lambda some: st.sampled_from([*some, *(256 * token % (largest + 1) for token in some), 1])
    )
    return st.lists(alphabet | st.just(separator), max_size=60).map(
        lambda tokens: np.array(tokens, dtype)
    )


two_bytes = texts(np.uint16, UINT16 - 1, UINT16)
three_bytes = texts(np.uint32, 2**24 - 2, UINT32)
four_bytes = texts(np.uint32, UINT32 - 1, UINT32)


@pytest.mark.parametrize("kind", [two_bytes, three_bytes, four_bytes], ids=["2", "3", "4"])
def test_order_is_that_of_the_tokens(kind):
    @settings(deadline=None, max_examples=200)
    @given(kind)
    def check(tokens):
        suffixes = build_suffix_array(tokens)
        assert suffixes.dtype == np.int32
        assert suffixes.tolist() == sorted_suffixes(tokens)

    check()


@pytest.mark.parametrize("token", [2**24 - 2, 2**24 - 1, 2**24, 2**24 + 5, UINT32 - 1])
def test_around_the_largest_number_of_three_bytes(token):
    tokens = np.array([token, 3, UINT32, token, 2, UINT32, 256, token, 1 << 16], np.uint32)
    assert build_suffix_array(tokens).tolist() == sorted_suffixes(tokens)
