"""Prompts are similar if they have tokens in common."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.index.segments import Segment, Tail
from hf_refspec.index.similar_prompts import similar_prompts

prompts = st.lists(st.lists(st.integers(0, 9), max_size=8), max_size=12)


def tail_of(texts, first: int) -> Tail:
    tail = Tail(first)
    for text in texts:
        tokens = np.array([*text, 3, -1])  # every output is a 3
        tail.extend(tokens, np.array([len(text) + 1]), np.array([len(text)]))
    return tail


def cosine(one, other) -> float:
    common = len(set(one) & set(other))
    return common / max(len(set(one)) * len(set(other)), 1) ** 0.5


@given(prompts, prompts, st.lists(st.integers(0, 12), max_size=8), st.data())
def test_finds_what_a_sort_finds(in_segment, in_tail, asked, data):
    texts = in_segment + in_tail
    oldest = data.draw(st.integers(0, len(texts)))
    parts = [tail_of(in_tail, len(in_segment)).snapshot()]
    if in_segment:
        parts.insert(0, Segment.build(*tail_of(in_segment, 0).arrays()))
    parts = [part for part in parts if part.end > oldest] or parts[-1:]
    found = similar_prompts(parts, np.array(asked, dtype=np.int64), oldest, 4, 10)
    numbers = range(oldest, len(texts))
    # Sorting is stable: of equal ones the newer is later.
    assert found == sorted(numbers, key=lambda i: round(cosine(texts[i], asked), 9))[-4:]
