"""`TokenBuffer` and `JoinedTexts` against plain lists."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.index.token_buffer import JoinedTexts, TokenBuffer

texts = st.lists(st.integers(-1, 6), max_size=30)


def occurrences(buffer: TokenBuffer | JoinedTexts, token: int) -> list[int]:
    _, previous, latest = buffer.text
    found = []
    position = latest[token] if token < len(latest) else -1
    while position >= 0:
        found.append(int(position))
        position = previous[position]
    return found


def assert_holds(buffer: TokenBuffer, tokens: list[int]) -> None:
    assert buffer.tokens.tolist() == tokens
    assert buffer.tokens.dtype == np.int32
    for token in range(8):
        expected = [i for i, each in enumerate(tokens) if each == token]
        assert occurrences(buffer, token) == expected[::-1]


@given(st.lists(st.one_of(texts, st.integers(0, 60)), max_size=8))
def test_holds_what_a_list_would_after_any_extends_and_truncates(steps):
    buffer, tokens = TokenBuffer(), []
    for step in steps:
        if isinstance(step, list):
            buffer.extend(np.array(step, dtype=np.int64))
            tokens += step
        else:
            buffer.truncate(min(step, len(tokens)))
            tokens = tokens[:step]
        assert_holds(buffer, tokens)


def test_keeps_everything_when_it_outgrows_its_storage():
    tokens = np.random.default_rng(0).integers(0, 7, 5000)
    buffer = TokenBuffer()
    for start in range(0, 5000, 7):
        buffer.extend(tokens[start : start + 7])
    assert_holds(buffer, tokens.tolist())


added = st.lists(st.integers(0, 6), max_size=12)
additions = st.lists(st.tuples(st.integers(-1, 5), added), min_size=1, max_size=30)


def held(texts: JoinedTexts) -> list[list[int]]:
    """What stands between boundaries."""
    return [[token for token in place if token >= 0] for place in texts._tokens.tolist()]


@given(additions, st.sampled_from([4, 256]))
def test_holds_what_lists_would_and_finds_every_token(steps, room):
    texts, expected = JoinedTexts(room), []
    for number, more in steps:
        if number < 0 or not expected:
            assert texts.add(np.array(more, dtype=np.int64)) == len(expected)
            expected.append(more)
        else:
            texts.extend(number % len(expected), np.array(more, dtype=np.int64))
            expected[number % len(expected)] = expected[number % len(expected)] + more
        assert len(texts) == len(expected)
        assert held(texts)[: len(expected)] == expected
        assert not any(held(texts)[len(expected) :])
    for token in range(7):
        places = np.flatnonzero(texts.text.tokens == token).tolist()
        assert sorted(occurrences(texts, token)) == places


def test_the_latest_of_all_texts_is_found_first():
    texts = JoinedTexts()
    for _ in range(2):
        texts.add(np.array([5]))
    texts.extend(0, np.array([7, 9]))
    assert texts.text.tokens[texts.text.latest[7] + 1] == 9
    texts.extend(1, np.array([7, 8]))
    assert texts.text.tokens[texts.text.latest[7] + 1] == 8
