"""Merged suffix arrays against plain sorting, wherever the parts end and whatever repeats."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.index import merge
from hf_refspec.index.suffix_array import DEPTH, build_suffix_array

SHALLOW = 8
types = st.sampled_from([np.uint16, np.uint32])
# Few tokens, among them the least and the separator, and runs that repeat: suffixes are alike.
tokens = st.lists(st.sampled_from([0, 1, -1]), min_size=1, max_size=12)
texts = st.lists(st.tuples(tokens, st.integers(1, 6)), min_size=1, max_size=6).map(
    lambda runs: [token for run, times in runs for token in run * times]
)
cuts = st.lists(st.integers(1, 100), max_size=5)


def parts_of(text: np.ndarray, cuts) -> list:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    arrays = [build_suffix_array(text[begin:end]) for begin, end in pairwise(places)]
    return [(len(array), lambda array=array: array) for array in arrays]


def merged(text, parts, block=merge.BLOCK, depth=DEPTH, threads=1) -> np.ndarray:
    with patch.multiple(merge, BLOCK=block, DEPTH=depth):
        return np.concatenate(list(merge.merge_suffixes(text, parts, threads)))


def reach(text: np.ndarray, position: int, depth: int = DEPTH) -> list[int]:
    """The first tokens of a suffix, as far as its document reaches."""
    first = text[position : position + depth].tolist()
    separator = np.iinfo(text.dtype).max
    return first[: first.index(separator) + 1] if separator in first else first


@pytest.mark.parametrize("depth", [SHALLOW, DEPTH])
def test_suffixes_are_in_order_and_those_alike_as_far_as_counts_stand_by_part(depth):
    @given(texts, types, cuts, st.integers(1, 40), st.booleans())
    def check(text, dtype, cuts, block, loose):
        text = np.array(text).astype(dtype)
        parts = parts_of(text, cuts)
        if loose:  # as where documents were cut out: in no order behind the ends of others
            starts = np.cumsum([0, *(length for length, _ in parts)]).tolist()
            of_parts = [text[a:b] for a, b in pairwise(starts)]
            orders = [sorted(range(len(t)), key=partial(reach, t)) for t in of_parts]
            parts = [(len(each), partial(np.array, each, np.int32)) for each in orders]
        found = merged(text, parts, block=block, depth=depth)
        assert found.dtype == np.int32
        beginnings = [reach(text, i, depth) for i in found]
        assert beginnings == sorted(beginnings)
        assert sorted(found.tolist()) == list(range(len(text)))
        if np.iinfo(dtype).max not in text:
            assert np.array_equal(found, merged(text, parts, depth=depth))  # in one block
            if len(text) <= depth:
                assert np.array_equal(found, build_suffix_array(text))

    check()


def test_blocks_in_several_threads():
    text = np.random.default_rng(0).zipf(1.3, 60_000).clip(max=5000).astype(np.uint16)
    text[40_000:50_000] = text[:10_000]  # a document that the corpus has twice
    parts = parts_of(text, [18_000, 18_020, 42_000])
    found = merged(text, parts, threads=2, block=2000)
    assert np.array_equal(found, merged(text, parts))
    assert np.array_equal(np.sort(found), np.arange(len(text)))

    def beginnings(suffixes):
        return text[np.minimum(suffixes[:, None] + np.arange(DEPTH), len(text) - 1)]

    assert np.array_equal(beginnings(found), beginnings(build_suffix_array(text)))


def test_a_text_of_one_token_takes_no_longer_than_another():
    text = np.zeros(400_000, np.uint16)
    found = merged(text, parts_of(text, [200_000]))  # a comparison of all of it takes hours
    assert np.array_equal(np.sort(found), np.arange(len(text)))
    assert found[: DEPTH - 1].tolist() == list(range(len(text) - 1, len(text) - DEPTH, -1))


@pytest.mark.parametrize("place", [0, 5, 250, -1])
@pytest.mark.parametrize("value", [-1, 300, 2**31 - 1, -(2**31)])
def test_suffixes_outside_of_their_part_are_refused(place, value):
    text = np.arange(600).astype(np.uint16) % 7
    parts = parts_of(text, [300])
    damaged = parts[1][1]().copy()
    damaged[place] = value
    with pytest.raises(ValueError, match="the datastore is damaged"):
        merged(text, [parts[0], (300, lambda: damaged)], block=50)


def test_suffixes_that_are_in_no_order_are_refused_or_stay_inside():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 5, 3000).astype(np.uint16)
    parts = parts_of(text, [1000, 2000])
    for seed in range(20):
        shuffled = np.random.default_rng(seed).permutation(1000).astype(np.int32)
        try:
            found = merged(
                text, [parts[0], (1000, lambda array=shuffled: array), parts[2]], block=40
            )
        except ValueError as error:
            assert "the datastore is damaged" in str(error)
        else:
            assert len(found) == 3000
