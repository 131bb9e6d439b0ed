"""REST's trie and the mixed one, against counting all that followed in plain Python."""

from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hf_refspec.drafting.tree import DraftTree
from hf_refspec.index import rest_trie
from hf_refspec.index.rest_trie import (
    LEAST_WEIGHT,
    PSEUDO_COUNT,
    all_matches,
    grow_trie,
    mixed_matches,
)
from hf_refspec.index.suffix_array import Continuations
from tests.helpers.datastores import shards_of
from tests.helpers.trees import nodes_of

VOCAB_SIZE = 3
ALL = 1_000_000  # continuations, more than there are

documents_lists = st.lists(
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=10), min_size=1, max_size=8
)
shard_counts = st.integers(1, 3)
contexts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=5)
types = st.sampled_from([np.uint16, np.uint32])


def occurrences(documents, pattern: list[int]) -> list[list[int]]:
    """What follows each occurrence of a pattern, to the end of its document."""
    return [
        document[start + len(pattern) :]
        for document in documents
        for start in range(len(document) - len(pattern) + 1)
        if document[start : start + len(pattern)] == pattern
    ]


def grown_by(grow):
    def grown(texts, context, budget=999, places=ALL, length=4):
        context = np.array(context, np.int32)
        read = {"REST_PLACES": places, "MIXED_PLACES": places, "CONTINUATION_LENGTH": length}
        with patch.multiple(rest_trie, **read):
            return DraftTree(*grow(texts, context, 1, budget))

    return grown


rest_tree, mixed_tree = grown_by(rest_trie.rest_tree), grown_by(rest_trie.mixed_tree)


def sampled(texts, context, min_match, budget):
    """The longest match alone, of which places are read evenly."""
    longest = all_matches(texts, context, min_match)[:1]
    places, length = rest_trie.REST_PLACES, rest_trie.CONTINUATION_LENGTH
    return rest_trie.trie_tree(texts, longest, [places], [length], budget, 0.0)


sampled_tree = grown_by(sampled)
# --- matches


@given(documents_lists, contexts, shard_counts, types, st.integers(1, 6))
def test_all_matches_are_all_places_in_all_shards(documents, context, count, dtype, min_match):
    texts = shards_of(documents, count, dtype)
    matches = all_matches(texts, np.array(context, np.int32), min_match)
    found = [(length, occurrences(documents, context[-length:])) for length in range(1, 6)]
    expected = [
        (length, len(places))
        for length, places in reversed(found)
        if places and min_match <= length <= len(context)
    ]
    assert [(match.length, match.count) for match in matches] == expected
    for match in matches:
        assert (match.ranges[:, 1] - match.ranges[:, 0]).sum() == match.count


@given(documents_lists, contexts, shard_counts, st.integers(1, 3))
def test_mixed_matches_are_the_lengths_that_stand_in_more_places(
    documents, context, count, min_match
):
    matches, _ = mixed_matches(shards_of(documents, count), np.array(context, np.int32), min_match)
    expected, places = [], 0
    for length in range(len(context), min_match - 1, -1):
        more = len(occurrences(documents, context[-length:]))
        if more > places:
            expected.append((length, more))
            places = more
    assert [(match.length, match.count) for match in matches] == expected


def test_a_frequent_match_leaves_nothing_to_shorter_ones():
    frequent = int(PSEUDO_COUNT / LEAST_WEIGHT) + 1
    context = np.array([1, 2], np.int32)
    for many, lengths in ((frequent - 100, [2, 1]), (frequent, [2])):
        matches, _ = mixed_matches(shards_of([[1, 2, 0]] * many + [[2, 1]]), context, 1)
        assert [match.length for match in matches] == lengths


# --- grow_trie


def grow(rows, occurrences, orders, pseudo_count, budget) -> DraftTree:
    padded = np.full((len(rows), max(map(len, rows), default=0)), -1, np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    lengths = np.array([len(row) for row in rows], np.int32)
    numbers = np.array(orders, np.int32), np.array(occurrences, np.float64)
    read = Continuations(padded, lengths, *numbers)
    return DraftTree(*grow_trie(read, max(orders, default=0) + 1, pseudo_count, budget))


def child_probs(rows, occurrences, orders, pseudo_count, path) -> dict[int, float]:
    """The children below a path, each with its probability given the path."""
    here = [i for i, row in enumerate(rows) if row[: len(path)] == path]
    probs: Counter = Counter()
    left = 1.0
    for order in sorted({orders[i] for i in here}):
        voters = [i for i in here if orders[i] == order]
        weight = left * len(voters) / (len(voters) + pseudo_count)
        left -= weight
        for i in voters:
            if len(rows[i]) > len(path):
                vote = occurrences[i] / sum(occurrences[j] for j in voters)
                probs[rows[i][len(path)]] += weight * vote
    return dict(probs)


def grow_slowly(rows, occurrences, orders, pseudo_count):
    """The twin of `grow_trie`: the probabilities of all nodes there can be."""
    nodes, unseen = {}, [([], 1.0)]
    while unseen:
        path, prob = unseen.pop()
        for token, prob_here in child_probs(rows, occurrences, orders, pseudo_count, path).items():
            nodes[(*path, token)] = prob * prob_here
            unseen.append(([*path, token], prob * prob_here))
    return nodes


@st.composite
def continuations(draw):
    rows = draw(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=12))
    orders = sorted(draw(st.integers(0, 2)) for _ in rows)
    return rows, [draw(st.sampled_from([1, 2, 5])) for _ in rows], orders


@given(continuations(), st.sampled_from([0.0, 1.0, PSEUDO_COUNT]), st.integers(0, 20))
def test_grow_trie_takes_the_most_probable_nodes(read, pseudo_count, budget):
    tree = grow(*read, pseudo_count, budget)
    tree.checked(VOCAB_SIZE)
    expected = grow_slowly(*read, pseudo_count)
    best = sorted(expected.values(), reverse=True)[:budget]
    assert tree.probs.tolist() == pytest.approx(best, rel=1e-5)
    assert (np.diff(tree.probs) <= 0).all()
    for path, prob in nodes_of(tree).items():
        assert prob == pytest.approx(expected[path], rel=1e-5)


# --- trees


def authors_search(continuations: list[list[int]], choices: int, order: list) -> set:
    """The nodes that `search` and `cut_to_choices` of REST's authors leave, written anew from what
    they do. Their hash maps have any order: here paths come in `order`, and the other way round
    where the longest are dropped."""
    counts = Counter(tuple(each[: i + 1]) for each in continuations for i in range(len(each)))
    assert sorted(order) == sorted(counts)
    heap: list[tuple[int, ...]] = []
    for path in order:
        if len(heap) == choices:
            top = max(heap, key=lambda each: (-counts[each], each))
            if counts[path] <= counts[top]:
                continue
            heap.remove(top)
        heap.append(path)
    latest_first = heap[::-1]
    left = sorted(latest_first, key=lambda each: -len(set(each)))
    while sum(len(set(each)) for each in left) > choices:
        del left[0]
    return {path[: i + 1] for path in left for i in range(len(path))}


@given(documents_lists, contexts, shard_counts, st.integers(1, 30), st.integers(1, 6))
def test_rests_tree_is_what_its_authors_search_selects(documents, context, count, budget, length):
    texts = shards_of(documents, count)
    matches = all_matches(texts, np.array(context, np.int32), 1)
    assume(matches)
    following = [each[:length] for each in occurrences(documents, context[-matches[0].length :])]
    tree = rest_tree(texts, context, budget, len(following), length)
    tree.checked(VOCAB_SIZE)
    all_nodes = nodes_of(sampled_tree(texts, context, 999, len(following), length))
    assert set(nodes_of(tree)) == authors_search(following, budget, list(all_nodes))
    for path, prob in nodes_of(tree).items():
        frequency = sum(tuple(each[: len(path)]) == path for each in following)
        assert prob == pytest.approx(frequency / len(following))


def test_of_a_bushy_trie_few_nodes_are_left_and_of_a_single_path_all():
    rng = np.random.default_rng(0)
    bushy = shards_of([[40, *rng.integers(0, 8, 10)] for _ in range(500)], vocab_size=41)
    tree = rest_tree(bushy, [40], 64, length=10)
    assert 8 < len(tree) < 40 and tree.depths().max() == 2
    single = shards_of([[40, *range(20)]], vocab_size=41)
    assert rest_tree(single, [40], 64, length=10).tokens.tolist() == list(range(10))


@given(documents_lists, contexts, shard_counts)
def test_a_mixed_tree_is_grown_from_all_its_matches(documents, context, count):
    texts = shards_of(documents, count)
    rows, orders = [], []
    matches, _ = mixed_matches(texts, np.array(context, np.int32), 1)
    for order, match in enumerate(matches):
        for following in occurrences(documents, context[-match.length :]):
            rows.append(following[: 4 if order else 12])
            orders.append(order)
    expected = grow_slowly(rows, [1.0] * len(rows), orders, PSEUDO_COUNT)
    assert nodes_of(mixed_tree(texts, context)) == pytest.approx(expected, rel=1e-5)


def test_where_the_longest_match_leaves_no_choice_it_is_followed_further():
    document = list(range(40))
    texts = shards_of([document, [1, 9]], vocab_size=40)
    assert mixed_tree(texts, [0, 1], length=5).depths().max() == 15
    assert rest_tree(texts, [0, 1], length=5).depths().max() == 5


def test_a_tree_of_a_sample_is_nearly_that_of_all():
    rng = np.random.default_rng(0)
    documents = [[0, int(token), 1] for token in rng.choice(20, 6000, p=np.arange(1, 21) / 210)]
    texts = shards_of(documents, 3, vocab_size=20)
    sample = nodes_of(sampled_tree(texts, [0], places=300, length=1))
    for path, prob in nodes_of(sampled_tree(texts, [0], length=1)).items():
        assert sample.get(path, 0.0) == pytest.approx(prob, abs=3 / 300)


def test_rest_reads_the_first_continuations_of_each_text():
    documents = [[0, token] for token in (1, 1, 2, 3, 3, 3)]
    texts = [*shards_of(documents, vocab_size=9), *shards_of([[0, 3]], vocab_size=9)]
    nodes = nodes_of(rest_tree(texts, [0], places=3))
    assert nodes == pytest.approx({(1,): 2 / 4, (2,): 1 / 4, (3,): 1 / 4})
