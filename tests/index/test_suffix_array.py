"""Suffix arrays against plain Python: their order, searching, and reading behind matches."""

from contextlib import suppress
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.drafting.copied_spans import copied_spans
from hf_refspec.index import suffix_array
from hf_refspec.index.suffix_array import (
    DEPTH,
    Continuations,
    IndexedText,
    build_suffix_array,
    find_suffixes,
    merge_suffixes,
    sample_continuations,
)
from tests.helpers.guarded import Guarded, guarded

VOCAB_SIZE = 4
types = st.sampled_from([np.uint16, np.uint32])
documents = st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8), min_size=1, max_size=8)
patterns = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=4)


def tokens_of(documents, dtype) -> np.ndarray:
    separator = np.iinfo(dtype).max
    return np.array([token for each in documents for token in [*each, separator]], dtype)


def text_of(documents, dtype=np.uint16, unfinished=()) -> IndexedText:
    """A text of whole documents; one at its end may go on in the next shard."""
    tokens = np.concatenate([tokens_of(documents, dtype), np.array(unfinished, dtype)])
    return IndexedText(tokens, build_suffix_array(tokens), VOCAB_SIZE)


# --- build_suffix_array

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


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", [two_bytes, three_bytes, four_bytes], ids=["2", "3", "4"])
def test_order_is_that_of_the_tokens(kind):
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


# --- find_suffixes


def find_slowly(text: IndexedText, pattern: list[int]) -> tuple[int, int]:
    """The twin of `find_suffixes` for one of them: all suffixes of the text one after another."""
    tokens = text.tokens.tolist()
    suffixes = [tokens[start:] for start in text.suffixes.tolist()]
    low = sum(suffix < pattern for suffix in suffixes)
    count = sum(suffix[: len(pattern)] == pattern for suffix in suffixes)
    return (low, low + count) if count else (0, 0)


tokens = st.integers(0, VOCAB_SIZE - 1)
contexts = st.lists(tokens, min_size=1, max_size=12)


@given(documents, contexts, types, st.integers(1, 6), st.lists(tokens, max_size=3))
def test_all_places_of_every_length_are_found(documents, context, dtype, min_match, unfinished):
    text = text_of(documents, dtype, unfinished)
    found = find_suffixes(text, np.array(context, np.int32), min_match)
    lengths = range(min_match, len(context) + 1)
    expected = [find_slowly(text, context[-length:]) for length in lengths]
    assert [tuple(row) for row in found.tolist()] == [each for each in expected if each != (0, 0)]


# --- sample_continuations


def sample_slowly(text: IndexedText, low, high, match_length, count, longest) -> list[list[int]]:
    """The twin of `sample_continuations`: the rows, each as long as it is."""
    tokens, rows = text.tokens.tolist(), []
    for row in range(count):
        position = text.suffixes[low + int((row + 0.5) * (high - low) / count)] + match_length
        behind = [*tokens[position : position + longest], text.separator]
        rows.append(behind[: behind.index(text.separator)])
    return rows


def room(rows: int, longest: int) -> Continuations:
    """What rows are written into."""
    return Continuations(
        np.full((rows, longest + 1), -1, np.int32),
        np.full(rows, -1, np.int32),
        np.full(rows, -1, np.int32),
        np.full(rows, -1.0),
    )


def sample(text: IndexedText, low, high, match_length, count, longest) -> list[list[int]]:
    """The rows of one range, written behind another row."""
    ranges = np.array([[low, high]], np.int64)
    plan = np.array([[match_length, high - low, count, longest]], np.int64)
    rows, lengths, orders, occurrences = written = room(count + 2, longest)
    assert sample_continuations(text, ranges, plan, 1, written) == count + 1
    assert lengths[0] == lengths[-1] == -1
    assert (rows[0] == -1).all() and (rows[-1] == -1).all() and (rows[:, longest] == -1).all()
    assert (orders[1:-1] == 0).all()
    assert occurrences[1:-1].sum() == pytest.approx(high - low)
    return [row[:length].tolist() for row, length in zip(rows[1:-1], lengths[1:-1], strict=True)]


@given(documents, patterns, types, st.integers(1, 12), st.integers(1, 5), st.booleans())
def test_sample_continuations_reads_on_until_the_document_ends(
    documents, pattern, dtype, count, longest, finished
):
    text = text_of(documents, dtype, () if finished else pattern)
    low, high = find_slowly(text, pattern)
    count = min(count, high - low)
    if count:
        arguments = (text, low, high, len(pattern), count, longest)
        assert sample(*arguments) == sample_slowly(*arguments)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 30), st.integers(0, 99)), max_size=4))
def test_a_text_has_its_rows_in_proportion_and_at_least_one(planned):
    text = text_of([[1] * 40])
    ranges = np.array([(0, here) for _, here, _ in planned], np.int64).reshape(-1, 2)
    plan = [(1, here + elsewhere, quota, 2) for quota, here, elsewhere in planned]
    expected = [
        order
        for order, (_, places, quota, _) in enumerate(plan)
        for _ in range(min(ranges[order, 1], max(ranges[order, 1] * quota // (places or 1), 1)))
    ]
    _, _, orders, occurrences = written = room(len(expected), 2)
    plan = np.array(plan, np.int64).reshape(-1, 4)
    assert sample_continuations(text, ranges, plan, 0, written) == len(expected)
    assert orders.tolist() == expected
    for order, (_, here, _) in enumerate(planned):
        assert occurrences[orders == order].sum() == pytest.approx(here)


# --- damaged arrays


@pytest.fixture
def uncompiled(monkeypatch):
    """Kernels run as plain Python, where arrays can be guarded."""
    monkeypatch.setattr(suffix_array, "_compare", suffix_array._compare.py_func)


@pytest.mark.hypothesis
def test_no_suffix_array_makes_the_kernels_read_outside(uncompiled):
    tokens_and_separators = st.integers(0, VOCAB_SIZE) | st.just(2**16 - 1)

    @given(
        st.lists(tokens_and_separators, min_size=1, max_size=10),
        st.lists(st.integers(-3, 12) | st.sampled_from([-(2**31), 2**31 - 1]), max_size=10),
        patterns,
        st.integers(1, 4),
    )
    def check(tokens, suffixes, pattern, longest):
        text = IndexedText(guarded(tokens, np.uint16), guarded(suffixes, np.int32), VOCAB_SIZE)
        with suppress(ValueError):
            pattern = guarded(pattern, np.int32)
            ranges = find_suffixes.python(text, pattern, 1).tolist()
            assert len(ranges) <= len(pattern)
            assert all(0 <= low < high <= len(suffixes) for low, high in ranges)
        count = len(suffixes)
        ranges = guarded([[0, count]], np.int64)
        plan = guarded([[len(pattern), count, count, longest]], np.int64)
        written = Continuations(*(array.view(Guarded) for array in room(count, longest)))
        with suppress(ValueError):
            assert sample_continuations.python(text, ranges, plan, 0, written) == count
            pairs = zip(written.rows.tolist(), written.lengths, strict=True)
            read = [row[:length] for row, length in pairs]
            assert all(0 <= token < VOCAB_SIZE for row in read for token in row)
            assert all(0 <= suffix < len(tokens) for suffix in suffixes)

    check()


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("suffix", [-1, -(2**31), 6, 2**31 - 1])
def test_a_suffix_outside_of_the_text_is_refused(dtype, suffix):
    tokens = tokens_of([[1, 2], [1, 3]], dtype)
    text = IndexedText(tokens, np.full(len(tokens), suffix, np.int32), VOCAB_SIZE)
    with pytest.raises(ValueError, match=r"the datastore is damaged: .* Datastore.verify\(\)"):
        find_suffixes(text, np.array([1], np.int32), 1)
    with pytest.raises(ValueError, match="the datastore is damaged"):
        sample(text, 0, 6, 1, 6, 3)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_a_token_outside_of_the_vocabulary_is_refused(dtype):
    tokens = tokens_of([[1, VOCAB_SIZE]], dtype)
    text = IndexedText(tokens, build_suffix_array(tokens), VOCAB_SIZE)
    with pytest.raises(ValueError, match="the datastore is damaged"):
        sample(text, *find_suffixes(text, np.array([1], np.int32), 1)[0], 1, 1, 3)


def test_spans_are_found_that_are_longer_than_a_text_is_sorted_by():
    rng = np.random.default_rng(0)
    alike = rng.integers(0, 1000, 200)
    documents = [np.concatenate([alike, [last], rng.integers(0, 1000, 20)]) for last in (9, 5, 1)]
    tokens = np.concatenate([[*each, 65535] for each in documents]).astype(np.uint16)
    parts = np.split(tokens, [222, 444])
    runs = [(len(part), partial(build_suffix_array, part)) for part in parts]
    merged = np.concatenate(list(merge_suffixes(tokens, runs)))
    text = IndexedText(tokens, merged, 1000)
    for document in documents:
        [span] = copied_spans(0, document, [("store", [text])])
        assert (span.start, span.end) == (0, len(document)) and span.offset == 0
        document[-1] = (document[-1] + 1) % 1000
        [span] = copied_spans(0, document, [("store", [text])])
        assert (span.start, span.end) == (0, len(document) - 1)


SHALLOW = 8
# Few tokens, among them the least and the separator, and runs that repeat: suffixes are alike.
few = st.lists(st.sampled_from([0, 1, -1]), min_size=1, max_size=12)
repetitive = st.lists(st.tuples(few, st.integers(1, 6)), min_size=1, max_size=6).map(
    lambda runs: [token for run, times in runs for token in run * times]
)
cuts = st.lists(st.integers(1, 100), max_size=5)


def parts_of(text: np.ndarray, cuts) -> list:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    arrays = [build_suffix_array(text[begin:end]) for begin, end in pairwise(places)]
    return [(len(array), lambda array=array: array) for array in arrays]


def merged(text, parts, block=suffix_array.BLOCK, depth=DEPTH, threads=1) -> np.ndarray:
    with patch.multiple(suffix_array, BLOCK=block, DEPTH=depth):
        return np.concatenate(list(suffix_array.merge_suffixes(text, parts, threads)))


def reach(text: np.ndarray, position: int, depth: int = DEPTH) -> list[int]:
    """The first tokens of a suffix, as far as its document reaches."""
    first = text[position : position + depth].tolist()
    separator = np.iinfo(text.dtype).max
    return first[: first.index(separator) + 1] if separator in first else first


@pytest.mark.hypothesis
@pytest.mark.parametrize("depth", [SHALLOW, DEPTH])
def test_suffixes_are_in_order_and_those_alike_as_far_as_counts_stand_by_part(depth):
    @given(repetitive, types, cuts, st.integers(1, 40), st.booleans())
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
