"""The table of next tokens, against a twin that is an ordered dictionary."""

import copy
import math
from collections import Counter, OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.index.recycling import (
    COMMONEST,
    KEY,
    LEAST_CHILD,
    LEAST_PROB,
    RUNNERS_UP,
    NextTokens,
    Pooling,
    TableContent,
)
from tests.helpers.trees import paths

VOCAB_SIZE = 6
TOP_K = 2
EXPONENTS = np.array(
    [
        [0.0, 0.0, 0.0, 0.3, 0.1],
        [0.8, 0.0, 0.0, 0.25, 0.3],
        [0.45, 0.7, 0.0, 0.1, 0.35],
        [0.35, 0.25, 0.65, 0.1, 0.25],
    ]
)
MISSES = np.exp([1.0, 1.5, 1.4, 1.2])


class Twin:
    """Contexts as tuples in a dictionary, the newest last."""

    def __init__(self, context: int, max_contexts: int):
        self.context, self.max_contexts = context, max_contexts
        self.held: OrderedDict[tuple, list] = OrderedDict()

    def learn(self, before, tokens, parents, best_tokens, best_probs):
        texts = [tuple(before)]
        for token, parent in zip(tokens, parents, strict=True):
            texts.append((*texts[1 + parent], token))
        for text, tokens_after, probs in zip(texts, best_tokens, best_probs, strict=True):
            if not probs[0] > 0:
                continue
            pairs = zip(tokens_after, probs, strict=True)
            best = [(t, p) if 0 < p <= 1 and t < VOCAB_SIZE else (-1, 0.0) for t, p in pairs]
            for length in range(1, min(self.context, len(text)) + 1):
                self.held.pop(text[-length:], None)
                if len(self.held) == self.max_contexts:
                    while len(self.held) > self.max_contexts * 7 // 8:
                        self.held.popitem(last=False)
                self.held[text[-length:]] = best


probabilities = st.sampled_from([0.0, 0.01, 0.2, 0.5, 0.9, math.nan, math.inf])


@st.composite
def lessons(draw):
    """What one forward pass tells."""
    size = draw(st.integers(0, 5))
    tokens = [draw(st.integers(0, VOCAB_SIZE - 1)) for _ in range(size)]
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    # Tokens beyond the vocabulary: of a model whose logits are padded.
    best = [[draw(st.integers(0, VOCAB_SIZE)) for _ in range(TOP_K)] for _ in range(size + 1)]
    probs = [[draw(probabilities) for _ in range(TOP_K)] for _ in range(size + 1)]
    before = [draw(st.integers(0, VOCAB_SIZE - 1)) for _ in range(draw(st.integers(0, 3)))]
    return before, tokens, parents, best, probs


def teach(table: NextTokens, lesson) -> None:
    before, tokens, parents, best, probs = lesson
    table.vocab_size = VOCAB_SIZE
    table.learn(
        np.array(before, np.int32),
        np.array(tokens, np.int64),
        np.array(parents, np.int32),
        np.array(best, np.int32),
        np.array(probs, np.float32),
    )


def held_by(table: NextTokens) -> list[tuple]:
    entries = table.entries()
    return [
        (tuple(t for t in context[::-1] if t >= 0), list(zip(tokens, probs, strict=True)))
        for context, tokens, probs in zip(
            entries.contexts.tolist(), entries.tokens.tolist(), entries.probs.tolist(), strict=True
        )
    ]


def rounded(held) -> list[tuple]:
    return [(c, [(t, pytest.approx(p, abs=1e-6)) for t, p in best]) for c, best in held]


@given(st.lists(lessons(), max_size=8), st.integers(1, 3), st.integers(1, 12))
def test_a_table_holds_the_contexts_that_were_verified_last(all_lessons, context, max_contexts):
    table, twin = NextTokens(TOP_K, context, max_contexts), Twin(context, max_contexts)
    for lesson in all_lessons:
        teach(table, lesson)
        twin.learn(*lesson)
    assert held_by(table) == rounded(twin.held.items())
    assert len(table) == len(twin.held)


@given(st.lists(lessons(), max_size=6), st.lists(lessons(), max_size=4))
def test_a_copy_goes_on_as_the_original_and_apart_from_it(first, second):
    table = NextTokens(TOP_K, 3, 10)
    for lesson in first:
        teach(table, lesson)
    table.count(np.arange(2000, dtype=np.int64) % 7)
    before = held_by(table)
    copied = copy.deepcopy(table)
    assert copied._counted == table._counted > 2000
    assert copied._counts.tolist() == table._counts.tolist()
    assert copied._commonest.tolist() == table._commonest.tolist()
    for lesson in second:
        teach(copied, lesson)
    assert held_by(table) == before
    for lesson in second:
        teach(table, lesson)
    assert held_by(table) == held_by(copied)


def test_a_full_table_takes_no_more_memory_than_is_said():
    """8 k + 28 to 8 k + 36 bytes a context, 24 MB by default, and the counts of tokens."""
    size = sum(array.nbytes for array in NextTokens(8, 3, 1 << 18)._table)
    assert (8 * 8 + 28) * (1 << 18) <= size <= (8 * 8 + 36) * (1 << 18)
    assert size < 25e6


@given(st.lists(st.lists(st.integers(0, 30)), max_size=5))
def test_the_commonest_tokens_are_those_that_came_most_often(texts):
    table = NextTokens(1, 1, 1)
    for text in texts:
        table.count(np.array(text, np.int64))
    counts = Counter(token for text in texts for token in text)
    kept = [token for token in table._commonest.tolist() if token >= 0]
    assert len(kept) == len(set(kept)) == min(COMMONEST, len(counts))
    assert [counts[token] for token in kept] == [n for _, n in counts.most_common(COMMONEST)]


# --- growth


def grown_by_twin(table: NextTokens, text, last, pooling, budget):
    """The nodes' paths and probabilities, the most probable first."""
    held = dict(held_by(table))
    waiting = {(): 1.0}
    runners_up = {(): last}
    nodes: dict[tuple, float] = {}
    while waiting and len(nodes) <= budget:
        path = max(waiting, key=lambda each: waiting[each])
        prob = nodes[path] = waiting.pop(path)
        whole = (*text, *path)
        entries = [held.get(whole[-n:]) if len(whole) >= n else None for n in (1, 2, 3)]
        known = max([0, *(n for n in (1, 2, 3) if entries[n - 1] is not None)])
        sources = [*zip(entries, pooling.exponents[known], strict=False)]
        sources.append((runners_up[path], pooling.exponents[known, 4]))
        scores: dict[int, float] = {int(t): 0.0 for t in table._commonest if t >= 0}
        for best, exponent in sources:
            for token, p in best or []:
                if token >= 0:
                    factor = exponent * math.log(1 + p / LEAST_PROB)
                    scores[token] = scores.get(token, 0.0) + factor
        for token in scores:
            frequency = table._counts[token] / table._counted if token < len(table._counts) else 0
            scores[token] += pooling.exponents[known, 3] * math.log(1 + frequency / LEAST_PROB)
        total = pooling.misses[known] + sum(map(math.exp, scores.values()))
        after = {token: math.exp(score) / total for token, score in scores.items()}
        best = sorted(after.items(), key=lambda each: -each[1])[:RUNNERS_UP]
        for token, p in after.items():
            if p * prob > LEAST_CHILD:
                waiting[(*path, token)] = p * prob
                runners_up[(*path, token)] = best
    del nodes[()]
    return nodes


@given(
    st.lists(lessons(), max_size=6),
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=3),
    st.sampled_from([1.0, 0.6]),
    st.integers(1, 20),
)
def test_a_tree_has_the_most_probable_nodes(all_lessons, counted, text, power, budget):
    pooling = Pooling(EXPONENTS, MISSES).flattened(power)
    table = NextTokens(TOP_K, 3, 50)
    for lesson in all_lessons:
        teach(table, lesson)
    table.count(np.array(counted, np.int64))
    last = [(1, 0.3), (4, 0.1)]
    tokens, parents, probs = table.tree(
        np.array(text, np.int32),
        np.array([t for t, _ in last], np.int32),
        np.array([p for _, p in last], np.float32),
        pooling,
        budget,
        False,
    )
    expected = grown_by_twin(table, text, last, pooling, budget)
    # Nodes of equal probability may stand in any order, and at the end in each other's place.
    np.testing.assert_allclose(sorted(probs), sorted(expected.values()), rtol=1e-4)
    last_prob = min(expected.values(), default=1.0)
    for path, prob in zip(paths(tokens, parents), probs, strict=True):
        if prob > 1.001 * last_prob:
            assert expected[path] == pytest.approx(prob, rel=1e-4)


def test_a_chain_goes_to_the_most_probable_child():
    table = NextTokens(1, 1, 10)
    for token in range(4):
        teach(table, ([token], [], [], [[token + 1]], [[0.9]]))
    none = np.empty(0, np.int32), np.empty(0, np.float32)
    text = np.array([0], np.int32)
    tokens, parents, _ = table.tree(text, *none, Pooling(EXPONENTS, MISSES), 3, True)
    assert (tokens.tolist(), parents.tolist()) == ([1, 2, 3], [-1, 0, 1])


def homes(table: NextTokens, contexts: np.ndarray) -> np.ndarray:
    """The slot at which the search for each context begins."""
    slots, state = table._table.slots, table._table.state
    mixed = state[KEY] + (state[KEY + 1 :] * contexts).sum(axis=1)
    return (mixed >> 32) & (len(slots) - 1)


def longest_search(table: NextTokens) -> int:
    """The most slots that the search for a context that is there looks at."""
    slots = table._table.slots
    taken = np.flatnonzero(slots)
    distances = taken - homes(table, table._table.contexts[slots[taken] - 1])
    return int((distances % len(slots)).max()) + 1


def test_contexts_that_collide_in_one_table_do_not_in_another():
    one = NextTokens(1, 3, 1 << 14)
    chance = np.random.default_rng(0)
    contexts = chance.integers(0, 2**31 - 1, (1 << 20, 3), dtype=np.int32)
    contexts = contexts[homes(one, contexts) < 32]
    assert len(contexts) > 900
    nothing = np.zeros((len(contexts), 1), np.float32)
    nobody = np.zeros(1, np.float32)
    entries = TableContent(contexts, nothing.astype(np.int32), nothing, nobody, None)
    one._replace_entries(entries, len(entries))
    other = NextTokens(1, 3, 1 << 14, entries)
    assert longest_search(one) > 500
    assert longest_search(other) < 50
    np.testing.assert_array_equal(one.entries().contexts, other.entries().contexts)
