"""LLMA's match, against all suffixes of all lengths."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.index.llma_match import llma_span
from hf_refspec.index.token_buffer import TokenBuffer

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
