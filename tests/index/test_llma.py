"""Spans and draft trees copied from a text, against twins that search for every match anew."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.index.llma import (
    ANCHOR_LENGTH,
    NEAR,
    NEAR_FACTOR,
    SKIP_LENGTH,
    copy_tree,
    llma_span,
)
from hf_refspec.index.token_buffer import TokenBuffer
from tests.helpers.trees import paths

texts = st.lists(st.integers(-1, 4), max_size=40)
contexts = st.lists(st.integers(0, 4), min_size=1, max_size=16)


def spans_slowly(text: list[int], context: list[int], match_length: int, copy_length: int):
    """The twin of `llma_span`."""
    for length in range(len(context), match_length - 1, -1):
        for start in range(length, len(text)):
            if text[start - length : start] == context[-length:] and text[start] >= 0:
                span = [*text[start : start + copy_length], -1]
                return span[: span.index(-1)]
    return []


@given(texts, contexts, st.integers(1, 3), st.integers(1, 9))
def test_the_span_follows_the_first_place_of_the_longest_suffix(text, context, n, k):
    buffer = TokenBuffer()
    buffer.extend(np.array(text, np.int64))
    begin, span = llma_span(buffer.text, np.array(context, np.int32), n, k)
    assert span.tolist() == text[begin : begin + len(span)] == spans_slowly(text, context, n, k)


def test_a_span_outlives_the_buffer_that_it_is_of():
    buffer = TokenBuffer()
    buffer.extend(np.array([1, 2, 3]))
    _, span = llma_span(buffer.text, np.array([1], np.int32), 1, 9)
    buffer.extend(np.zeros(10_000, np.int64))
    assert span.tolist() == [2, 3]


def common_suffix(a: list[int], b: list[int]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[-1 - length] == b[-1 - length]:
        length += 1
    return length


def grow(text, context, budget, match_length=1, copy_length=99, chain=False, anchor=-1):
    buffer = TokenBuffer()
    buffer.extend(np.array(text, dtype=np.int64))
    options = match_length, copy_length, chain, anchor
    tree, anchor = copy_tree(buffer.text, np.array(context, np.int32), budget, *options)
    return *(array.tolist() for array in tree), anchor


def child_probs(text, context, path, match_length, anchor):
    """The children that matches propose below `path`, token -> conditional probability."""
    context_and_path = context + path
    found = {}  # position -> weights' lengths, at most one exact and one skipping match each
    for position in range(1, len(text)):
        if text[position] < 0:
            continue
        exact = common_suffix(text[:position], context_and_path)
        joins = exact >= 1 and (match_length == 1 or exact - len(path) >= match_length)
        if joins:
            found.setdefault(position, []).append(min(exact, len(context) + len(path)))
        # A skipping match replaced the context's last token and agrees with all of the path.
        root = position - len(path)
        skips = (
            root >= 2
            and text[root:position] == path
            and text[root - 1] >= 0
            and text[root - 1] != context[-1]
            and common_suffix(text[: root - 1], context[:-1]) >= max(2, match_length)
        )
        if skips:
            found.setdefault(position, []).append(SKIP_LENGTH + len(path))
    weights: dict[int, float] = {}
    longest = 0.0
    for position, lengths in found.items():
        near = anchor >= 0 and 0 <= position - anchor < NEAR
        for length in lengths:
            longest = max(longest, length)
            weight = length**3 * (NEAR_FACTOR if near else 1)
            weights[text[position]] = weights.get(text[position], 0.0) + weight
    total = sum(weights.values())
    return {t: w / total * longest / (longest + 1) for t, w in weights.items()}


def twin_anchor(text, context, match_length, anchor):
    best = ANCHOR_LENGTH - 1
    for skipped in range(min(2, len(context))):
        known = context[: len(context) - skipped]
        for position in range(len(text) - 1, skipped, -1):
            replaced = text[position - 1] if skipped else None
            if text[position] < 0 or replaced in (-1, context[-1]):
                continue
            length = common_suffix(text[: position - skipped], known)
            if length > best and length >= match_length:
                best, anchor = length, position
    return anchor


def grow_slowly(text, context, budget, match_length, copy_length, anchor):
    """The twin of `copy_tree`: every match is searched for anew at every node."""
    anchor = twin_anchor(text, context, match_length, anchor)
    nodes, waiting, path, node, prob = [], {}, [], -1, 1.0
    while True:
        if len(path) < copy_length:
            for token, share in child_probs(text, context, path, match_length, anchor).items():
                waiting[node, token] = prob * share, [*path, token]
        if not waiting or len(nodes) == budget:
            return nodes, waiting, anchor
        (parent, token), (prob, path) = max(waiting.items(), key=lambda item: item[1][0])
        del waiting[parent, token]
        node = len(nodes)
        nodes.append((tuple(path), prob))


@given(
    texts,
    contexts,
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(-1, 30),
)
def test_copy_tree_takes_the_most_probable_nodes(
    text, context, budget, match_length, copy_length, anchor
):
    limits = context, budget, match_length, copy_length
    tokens, parents, probs, new_anchor = grow(text, *limits, anchor=anchor)
    nodes, waiting, expected_anchor = grow_slowly(text, *limits, anchor)
    assert new_anchor == expected_anchor
    assert probs == pytest.approx([prob for _, prob in nodes], rel=1e-5)
    # Nodes of equal probability may come in any order, and either may be the last that fits.
    expected = dict(nodes) | {tuple(path): prob for prob, path in waiting.values()}
    for path, prob in zip(paths(tokens, parents), probs, strict=True):
        if path in expected:
            assert prob == pytest.approx(expected[path], rel=1e-5)
    ties = len({round(prob, 6) for prob in expected.values()}) < len(expected)
    assert ties or set(paths(tokens, parents)) == {path for path, _ in nodes}


@given(texts, contexts, st.integers(1, 30))
def test_a_chain_is_the_most_probable_child_of_each_node(text, context, budget):
    tokens, parents, probs, _ = grow(text, context, budget, chain=True)
    assert len(tokens) <= budget and parents == list(range(-1, len(tokens) - 1))
    path, anchor = [], twin_anchor(text, context, 1, -1)
    for token, prob, before in zip(tokens, probs, [1.0, *probs], strict=False):
        children = child_probs(text, context, path, 1, anchor)
        assert prob == pytest.approx(before * max(children.values()), rel=1e-5)
        path.append(token)


def test_one_token_over_and_over_is_drafted_to_the_full_budget():
    tokens, parents, _, _ = grow([3] * 5000, [3] * 16, budget=40)
    assert tokens == [3] * 40
    assert parents == list(range(-1, 39))


def test_a_long_match_is_found_behind_any_number_of_short_ones():
    context = list(range(10, 26))
    tokens, _, _, _ = grow([*context, 4, *[9, 25] * 3000], context, budget=1)
    assert tokens == [4]
