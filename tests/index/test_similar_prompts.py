"""Prompts are similar if they have tokens in common."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.index.similar_prompts import similar_prompts

prompts = st.lists(st.lists(st.integers(0, 9), max_size=8), max_size=12)


def cosine(one, other) -> float:
    common = len(set(one) & set(other))
    return common / max(len(set(one)) * len(set(other)), 1) ** 0.5


@given(prompts, st.lists(st.integers(0, 12), max_size=8), st.data())
def test_finds_what_a_sort_finds(texts, asked, data):
    skipped = data.draw(st.integers(0, len(texts)))
    tokens = [token for text in texts for token in [*text, 3, -1]]  # every output is a 3
    lengths = np.array([len(text) for text in texts], dtype=np.int32)
    ends = np.cumsum(lengths + 2, dtype=np.int32) - np.int32(1)
    documents = np.array(tokens, dtype=np.int32), ends, lengths, skipped
    found = similar_prompts(*documents, np.array(asked, dtype=np.int64), 4, 10)
    numbers = range(skipped, len(texts))
    # Sorting is stable: of equal ones the newer is later.
    assert found.tolist() == sorted(numbers, key=lambda i: round(cosine(texts[i], asked), 9))[-4:]
