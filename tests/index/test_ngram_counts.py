"""The counting of n-grams along a suffix array, against a `Counter`."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import numpy as np
from guarded import guarded_arrays
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.index import ngram_counts
from hf_refspec.index.suffix_array import IndexedText, build_suffix_array

VOCAB_SIZE = 5
types = st.sampled_from([np.dtype(np.uint16), np.dtype(np.uint32)])


@st.composite
def separated_texts(draw):
    dtype = draw(types)
    separator = int(np.iinfo(dtype).max)
    text = draw(st.lists(st.integers(0, 2) | st.just(separator), max_size=40))
    return np.array([*text, separator], dtype)


def counted(text: list[int], length: int) -> Counter:
    windows = (tuple(text[i : i + length]) for i in range(len(text) - length + 1))
    return Counter(window for window in windows if max(window) < VOCAB_SIZE)


def commonest(text: list[int], length: int, most: int) -> list[tuple[int, ...]]:
    """The twin of `common_ngrams`: whole groups of what stands equally often, as far as twice as
    many as are wanted have room, and of these the first ones."""
    counts = {ngram: n for ngram, n in counted(text, length).items() if n > 1}
    least = 2
    while sum(n >= least for n in counts.values()) > 2 * most:
        least += 1
    kept = sorted(ngram for ngram, n in counts.items() if n >= least)
    return sorted(kept, key=lambda ngram: -counts[ngram])[:most]


@given(separated_texts(), st.integers(1, 4), st.integers(1, 6), st.integers(1, 50))
def test_they_are_the_commonest_within_documents_whatever_the_blocks(text, longest, most, block):
    indexed = IndexedText(text, build_suffix_array(text), VOCAB_SIZE)
    with patch.object(ngram_counts, "BLOCK", block):
        found = ngram_counts.common_ngrams(indexed, longest, most)
    assert len(found) == longest
    for length, ngrams in enumerate(found, start=1):
        assert ngrams.dtype == np.int32 and ngrams.shape[1] == length
        assert list(map(tuple, ngrams.tolist())) == commonest(text.tolist(), length, most)


@given(
    guarded_arrays(st.integers(0, VOCAB_SIZE) | st.just(2**16 - 1), np.uint16, 8),
    guarded_arrays(st.integers(-3, 10) | st.sampled_from([-(2**31), 2**31 - 1]), np.int32, 8),
)
def test_no_suffix_array_makes_it_read_or_write_outside(text, suffixes):
    least, runs = np.full(3, 2), np.full((3, 2), -1)
    ended = np.full((3, 5, 2), -1)
    for before in (-1, suffixes.tolist()[-1]):
        limits = VOCAB_SIZE, least
        numbers = ngram_counts.count_runs.python(text, suffixes, before, *limits, runs, ended)
        assert numbers.max() <= 5
        for length, (order, number) in enumerate(zip(ended, numbers, strict=True), start=1):
            assert ((order[:number, 0] >= 0) & (order[:number, 0] + length <= len(text))).all()
