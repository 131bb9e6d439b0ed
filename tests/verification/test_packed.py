"""Each row's own cache, and attention of packed rows against attention of each row by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from hf_refspec.verification.packed import PackedMask, PackedPass, RowEntries


def random_cache(rows: int, length: int, layers: int = 2) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(layers):
        cache.update(torch.randn(rows, 2, length, 4), torch.randn(rows, 2, length, 4), layer)
    return cache


@given(
    skipped=st.integers(0, 3),
    passes=st.lists(st.tuples(st.integers(1, 200), st.data()), max_size=5),
)
def test_a_row_keeps_what_it_is_told_to_and_nothing_else(skipped, passes):
    torch.manual_seed(0)
    cache = random_cache(2, 4)
    row = RowEntries(cache, 1, skipped)
    expected = [layer.keys[1:, :, skipped:] for layer in cache.layers]
    for size, data in passes:
        kept = sorted(data.draw(st.sets(st.integers(0, size - 1))))
        for layer in range(2):
            keys = torch.randn(1, 2, size, 4)
            seen, values = row.written(layer, keys, -keys)
            assert torch.equal(seen, torch.cat([expected[layer], keys], dim=2))
            assert torch.equal(values[:, :, row.length :], -keys)
            expected[layer] = torch.cat([expected[layer], keys[:, :, kept]], dim=2)
        row.keep(kept)
        row.length += len(kept)
    for (keys, _), each in zip(row.first(row.length), expected, strict=True):
        assert torch.equal(keys, each)


@pytest.mark.parametrize("heads", [2, 6])
def test_packed_rows_attend_to_their_own_entries_alone(heads):
    torch.manual_seed(0)
    cache, sizes = random_cache(3, 5, layers=1), [3, 0, 1]
    rows = [RowEntries(cache, row, 0) for row in range(3)]
    tree = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=np.bool_)
    mask = torch.cat([torch.ones(3, 5, dtype=torch.bool), torch.from_numpy(tree)], dim=-1)
    packed = PackedPass(rows, sizes, [mask, None, None])
    query, keys = torch.randn(1, heads, 4, 4), torch.randn(1, 2, 4, 4)
    packed.update(0, keys, -keys)
    given = PackedMask.of(packed, torch.device("cpu")).to(torch.float32)  # as models may cast it
    attended = torch.nn.functional.scaled_dot_product_attention(query, keys, keys, attn_mask=given)
    begin = 0
    for row, size, own in zip(range(3), sizes, [mask, None, None], strict=True):
        end = begin + size
        seen = torch.cat([cache.layers[0].keys[row : row + 1], keys[:, :, begin:end]], dim=2)
        values = torch.cat([cache.layers[0].values[row : row + 1], -keys[:, :, begin:end]], dim=2)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, begin:end],
            seen.repeat_interleave(heads // 2, dim=1),
            values.repeat_interleave(heads // 2, dim=1),
            attn_mask=own,
        )
        torch.testing.assert_close(attended[:, :, begin:end], expected)
        begin = end


def test_attention_that_comes_before_the_cache_is_an_error():
    packed = PackedPass([], [1], [None])
    with pytest.raises(RuntimeError, match="without having written to the cache"):
        packed.attend(torch.zeros(1, 2, 1, 4), None)
