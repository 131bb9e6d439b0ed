"""`TokenBuffer` against a plain list."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.index.kernels import compile_kernels
from hf_refspec.index.token_buffer import TokenBuffer

compile_kernels()  # here, where it is in no test's time

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


@pytest.mark.parametrize("length", [-1, 4])
def test_truncate_names_a_length_that_is_not_there(length):
    buffer = TokenBuffer()
    buffer.extend(np.array([1, 2, 3]))
    with pytest.raises(ValueError, match="length must be from 0 to 3"):
        buffer.truncate(length)
