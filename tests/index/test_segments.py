"""Segments and tail together hold what one sorted text would."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import nodes_of

from hf_refspec.drafting.tree import DraftTree
from hf_refspec.index.mixed_trie import mixed_tree
from hf_refspec.index.segments import GROWTH, LARGEST_SEGMENT, Segment, Tail, due_to_join, joined

calls = st.lists(
    st.tuples(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), min_size=1)),
    min_size=1,
    max_size=12,
)
large_ids = st.sampled_from([0, 65_534, 70_000])


def tail_of(documents, first=0) -> Tail:
    tail = Tail(first)
    for prompt, output in documents:
        tokens = np.array([*prompt, *output, -1])
        tail.extend(tokens, np.array([len(tokens) - 1]), np.array([len(prompt)]))
    return tail


def segment_of(documents, first=0) -> Segment:
    return Segment.build(*tail_of(documents, first).arrays())


def documents_of(part) -> list[tuple[list[int], list[int]]]:
    documents = [part.document(number) for number in range(part.first, part.end)]
    return [(prompt.tolist(), output.tolist()) for prompt, output in documents]


def sorted_suffixes(segment: Segment) -> list[int]:
    tokens = segment.text.tokens.tolist()
    return sorted(range(len(tokens)), key=lambda begin: tokens[begin:])


@given(calls, st.data())
def test_joined_segments_are_one_text(documents, data):
    cuts = sorted(data.draw(st.lists(st.integers(1, len(documents)), max_size=3, unique=True)))
    bounds = sorted({0, *cuts, len(documents)})
    segments = [segment_of(documents[low:high], low) for low, high in pairwise(bounds)]
    oldest = data.draw(st.integers(0, len(documents) - 1))
    segment = joined(segments, oldest)
    assert (segment.first, segment.end) == (oldest, len(documents))
    assert documents_of(segment) == documents[oldest:]
    assert segment.text.suffixes.tolist() == sorted_suffixes(segment)


@given(calls, st.data())
@settings(max_examples=50)
def test_documents_since_a_number(documents, data):
    number = data.draw(st.integers(0, len(documents) - 1))
    segment = segment_of(documents).since(number)
    assert documents_of(segment) == documents[number:]
    assert segment.text.suffixes.tolist() == sorted_suffixes(segment)
    assert documents_of(tail_of(documents).since(number)) == documents[number:]


@given(calls, st.lists(st.integers(0, 3), min_size=1, max_size=5), st.data())
def test_drafts_of_segments_are_those_of_one_index(documents, context, data):
    cut = data.draw(st.integers(0, len(documents)))
    parts = [(documents[:cut], 0), (documents[cut:], cut)]
    segments = [segment_of(some, first) for some, first in parts if some]
    one = segment_of(documents)
    context = np.array(context, dtype=np.int32)
    trees = []
    for texts in ([one.text], [segment.text for segment in segments]):
        trees.append(nodes_of(DraftTree(*mixed_tree(texts, context, 1, 1000, 10_000, 10))))
    assert trees[0].keys() == trees[1].keys()
    for path, prob in trees[0].items():
        assert trees[1][path] == pytest.approx(prob, abs=1e-5)


@given(calls, st.lists(st.integers(0, 3), min_size=1, max_size=3))
def test_tail_links_the_places_that_a_segment_finds(documents, pattern):
    tail, segment = tail_of(documents), segment_of(documents)
    low, high = segment.text.find(np.array(pattern, dtype=np.int32))
    found = sorted(segment.text.suffixes[low:high].tolist())
    linked, places = tail.snapshot().text, []
    last = pattern[-1]
    place = linked.latest[last] if last < len(linked.latest) else -1
    while place >= 0:
        begin = place - len(pattern) + 1
        if begin >= 0 and linked.tokens[begin : place + 1].tolist() == pattern:
            places.append(int(begin))
        place = linked.previous[place]
    assert sorted(places) == found


@given(st.lists(st.lists(large_ids, min_size=1, max_size=4), min_size=2, max_size=5))
@settings(max_examples=50)
def test_ids_of_both_widths_are_joined(outputs):
    segments = [segment_of([([], output)], i) for i, output in enumerate(outputs)]
    segment = joined(segments, 0)
    assert documents_of(segment) == [([], output) for output in outputs]
    assert segment.text.vocab_size == max(map(max, outputs)) + 1
    assert segment.text.suffixes.tolist() == sorted_suffixes(segment)


def test_a_snapshot_of_the_tail_stays_as_it_is():
    tail = tail_of([([1, 2], [3])])
    linked = tail.snapshot().text
    before = [array.copy() for array in (linked.tokens, linked.previous, linked.latest)]
    for _ in range(1000):
        tail.extend(np.array([3, 2, 1, 900, -1]), np.array([4]), np.array([2]))
    for array, old in zip((linked.tokens, linked.previous, linked.latest), before, strict=True):
        np.testing.assert_array_equal(array, old)


@given(st.lists(st.integers(1, 1000), max_size=30))
def test_sizes_grow_geometrically(added):
    sizes: list[int] = []
    for size in added:
        sizes.append(size)
        while (due := due_to_join(sizes)) is not None:
            assert due.stop - due.start > 1
            sizes[due] = [sum(sizes[due])]
        for i in range(1, len(sizes)):
            assert sizes[i - 1] > GROWTH * sizes[i]
    assert sum(sizes) == sum(added)


def test_the_largest_segments_are_left_alone():
    assert due_to_join([LARGEST_SEGMENT, LARGEST_SEGMENT, 10]) is None
    assert due_to_join([LARGEST_SEGMENT, 10, 10]) == slice(1, 3)
    assert due_to_join([]) is None
