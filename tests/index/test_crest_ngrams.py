"""The counting of n-grams along suffix arrays, against a `Counter`."""

from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.index import crest
from hf_refspec.index.crest import common_ngrams, count_runs
from hf_refspec.index.suffix_array import IndexedText, build_suffix_array
from tests.helpers.guarded import guarded_arrays

VOCAB_SIZE = 5
types = st.sampled_from([np.dtype(np.uint16), np.dtype(np.uint32)])


@st.composite
def texts_of_a_type(draw):
    """Texts that end within a document or behind one."""
    dtype = draw(types)
    separator = int(np.iinfo(dtype).max)
    text = st.lists(st.integers(0, 2) | st.just(separator), min_size=1, max_size=40)
    return [np.array(each, dtype) for each in draw(st.lists(text, min_size=1, max_size=4))]


def commonest(texts, length: int, most: int) -> list[tuple[tuple[int, ...], int]]:
    """The twin of `common_ngrams`: as CREST's code sorts all n-grams of a length, with counts."""
    counts = Counter(
        window
        for text in texts
        for window in zip(*(text[i:].tolist() for i in range(length)), strict=False)
        if max(window) < VOCAB_SIZE
    )
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]


@given(texts_of_a_type(), st.integers(1, 4), st.integers(1, 6), st.integers(1, 50))
def test_they_are_the_commonest_of_all_texts_whatever_the_blocks(texts, longest, most, block):
    indexed = [IndexedText(text, build_suffix_array(text), VOCAB_SIZE) for text in texts]
    with patch.object(crest, "BLOCK", block), patch.object(crest, "LEAST_BLOCK", 1):
        ngrams, counts = common_ngrams(indexed, longest, most)
    assert len(ngrams) == len(counts) == longest
    for length, (found, numbers) in enumerate(zip(ngrams, counts, strict=True), start=1):
        assert found.dtype == np.int32 and found.shape[1] == length
        pairs = [*zip(map(tuple, found.tolist()), numbers.tolist(), strict=True)]
        assert pairs == commonest(texts, length, most)


def test_memory_does_not_grow_with_the_texts():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 60_000, 2_000_000).astype(np.uint16)
    indexed = IndexedText(text, build_suffix_array(text), 60_000)
    held = []

    class Order(crest._Order):
        def add(self, *arguments):
            super().add(*arguments)
            held.append(len(self.counts))

    with patch.object(crest, "_Order", Order):
        ngrams, _ = common_ngrams([indexed], 3, 1000)
    assert [len(each) for each in ngrams] == [1000] * 3
    assert max(held) <= 4 * 1000 + crest.BLOCK


@given(
    guarded_arrays(st.integers(0, VOCAB_SIZE) | st.just(2**16 - 1), np.uint16, 8),
    guarded_arrays(st.integers(-3, 10) | st.sampled_from([-(2**31), 2**31 - 1]), np.int32, 8),
)
def test_no_suffix_array_makes_it_read_or_write_outside(text, suffixes):
    rows, counts = np.full((len(suffixes), 3), 77, np.uint32), np.zeros(len(suffixes), np.int64)
    arguments = text, suffixes, VOCAB_SIZE, rows, counts
    if ((suffixes >= 0) & (suffixes < len(text))).all():
        number = count_runs.python(*arguments)
        assert counts[:number].sum() == len(suffixes)
        common_ngrams([IndexedText(np.array(text), np.array(suffixes), VOCAB_SIZE)] * 2, 3, 2)
    else:
        with pytest.raises(ValueError, match="do not belong together"):
            count_runs.python(*arguments)
