"""The counting of n-grams along a suffix array, against a `Counter`."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_refspec.index.ngram_counts import common_prefixes, frequent_runs
from hf_refspec.index.suffix_array import build_suffix_array

VOCAB_SIZE = 5
types = st.sampled_from([np.dtype(np.uint16), np.dtype(np.uint32)])


class Guarded(np.ndarray):
    """An array that may not be read or written outside, nor from its end."""

    def __getitem__(self, index):
        assert isinstance(index, slice) or index >= 0
        return super().__getitem__(index)

    def __setitem__(self, index, value):
        assert index >= 0
        super().__setitem__(index, value)


def arrays(elements, dtype, size) -> st.SearchStrategy[np.ndarray]:
    return st.lists(elements, min_size=size, max_size=size).map(
        lambda values: np.array(values, dtype).view(Guarded)
    )


@st.composite
def separated_texts(draw):
    dtype = draw(types)
    separator = int(np.iinfo(dtype).max)
    text = draw(st.lists(st.integers(0, 2) | st.just(separator), max_size=40))
    return np.array([*text, separator], dtype)


def prefixes(text: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    suffixes = build_suffix_array(text)
    return suffixes, *common_prefixes(text, suffixes, VOCAB_SIZE, longest)


def common_prefix(a: list[int], b: list[int]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


@settings(deadline=None)
@given(separated_texts(), st.integers(1, 4))
def test_common_prefixes_end_with_the_document(text, longest):
    suffixes, shared, whole = prefixes(text, longest)
    separator = int(np.iinfo(text.dtype).max)
    begins = []
    for start in suffixes.tolist():
        suffix = text[start:].tolist()
        begins.append(suffix[: suffix.index(separator)][:longest])
    assert whole.tolist() == [len(begin) for begin in begins]
    pairs = zip([[], *begins], begins, strict=False)
    assert shared.tolist() == [common_prefix(before, begin) for before, begin in pairs]


def ngram_counts(text: list[int], length: int) -> Counter:
    windows = (tuple(text[i : i + length]) for i in range(len(text) - length + 1))
    return Counter(window for window in windows if max(window) < VOCAB_SIZE)


@settings(deadline=None)
@given(separated_texts(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 30))
def test_frequent_runs_are_the_frequent_ngrams_within_documents(text, length, least, room):
    suffixes, shared, whole = prefixes(text, 4)
    firsts, counts = np.full(room, -1), np.full(room, -1)
    found = frequent_runs(shared, whole, length, least, firsts, counts)
    frequent = {n: c for n, c in ngram_counts(text.tolist(), length).items() if c >= least}
    assert found == len(frequent)
    written = min(found, room)
    assert (firsts[written:] == -1).all()
    starts = suffixes[firsts[:written]].tolist()
    runs = [tuple(text[start : start + length].tolist()) for start in starts]
    expected = [(ngram, frequent[ngram]) for ngram in sorted(frequent)[:room]]
    assert list(zip(runs, counts.tolist(), strict=False)) == expected


@settings(deadline=None, max_examples=200)
@given(
    arrays(st.integers(0, VOCAB_SIZE) | st.just(2**16 - 1), np.uint16, 8),
    arrays(st.integers(-3, 10) | st.sampled_from([-(2**31), 2**31 - 1]), np.int32, 8),
)
def test_no_suffix_array_makes_common_prefixes_read_outside(text, suffixes):
    shared, whole = common_prefixes.python(text, suffixes, VOCAB_SIZE, 3)
    for start, length in zip(suffixes.tolist(), whole.tolist(), strict=True):
        assert length == 0 or 0 <= start <= start + length <= len(text)
    assert (shared <= whole).all()
