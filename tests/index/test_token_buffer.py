"""`TokenBuffer` against a plain list."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.index.token_buffer import TokenBuffer

texts = st.lists(st.integers(-1, 6), max_size=30)


def occurrences(buffer: TokenBuffer, token: int) -> list[int]:
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
