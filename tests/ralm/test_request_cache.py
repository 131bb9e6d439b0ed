from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_refspec.ralm.request_cache import RequestCache


def held_by_hand(additions: list[list[int]], most: int) -> list[int]:
    """Ids: the twin of what is added."""
    last_added: dict[int, int] = {}
    for number, ids in enumerate(additions):
        last_added.update(dict.fromkeys(ids, number))
        kept = sorted(last_added, key=lambda i: (-last_added[i], i))[: max(most, len(set(ids)))]
        last_added = {i: last_added[i] for i in kept}
    return sorted(last_added)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 59), min_size=1, max_size=12), min_size=1, max_size=8),
    st.integers(3, 80),
)
def test_it_holds_what_was_added_last(additions, most):
    cache = RequestCache(most)
    for ids in additions:
        cache.add(np.array(ids))
    assert cache.ids.tolist() == held_by_hand(additions, most)
