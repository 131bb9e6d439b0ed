"""`SideBySide` against plain lists."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.index import side_by_side
from hf_refspec.index.side_by_side import SideBySide

tokens = st.lists(st.integers(0, 6), max_size=12)
steps = st.lists(st.tuples(st.integers(-1, 5), tokens), min_size=1, max_size=30)


def held(texts: SideBySide) -> list[list[int]]:
    """What stands between boundaries."""
    places = texts.text.tokens.reshape(-1, texts._room).tolist()
    return [[token for token in place if token >= 0] for place in places]


@given(steps, st.sampled_from([4, 256]))
def test_holds_what_lists_would_and_finds_every_token(steps, room):
    before, side_by_side._ROOM = side_by_side._ROOM, room
    try:
        texts, expected = SideBySide(), []
    finally:
        side_by_side._ROOM = before
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
    linked = texts.text
    for token in range(7):
        found, position = [], linked.latest[token] if token < len(linked.latest) else -1
        while position >= 0:
            found.append(position)
            position = linked.previous[position]
        assert sorted(found) == np.flatnonzero(linked.tokens == token).tolist()


def test_the_latest_of_all_texts_is_found_first():
    texts = SideBySide()
    for _ in range(2):
        texts.add(np.array([5]))
    texts.extend(0, np.array([7, 9]))
    assert texts.text.tokens[texts.text.latest[7] + 1] == 9
    texts.extend(1, np.array([7, 8]))
    assert texts.text.tokens[texts.text.latest[7] + 1] == 8
