"""Attention of packed rows against attention of each row by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_refspec.verification.packed_attention import PackedMask, PackedPass, UnpackableError
from hf_refspec.verification.row_blocks import RowBlocks, RowEntries
from hf_refspec.verification.row_pass import RowPass

ONE = np.ones((1, 1), dtype=np.bool_)
CHAIN = np.tri(3, dtype=np.bool_)
TREE = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=np.bool_)
NOTHING = np.empty((0, 0), dtype=np.bool_)


def rows_of(lengths: list[int], visible: list[np.ndarray], hidden: int = 0) -> list[RowPass]:
    """Rows with entries of these lengths in one layer, in the order of their blocks; `hidden` of
    the first entries of the first row are not seen."""
    blocks, rows = RowBlocks(), []
    for i, (length, each) in enumerate(zip(lengths, visible, strict=True)):
        row = RowEntries(0, length)
        states = [(torch.randn(1, 2, length, 4), torch.randn(1, 2, length, 4))]
        blocks.add(row, states, room=len(each), capacity=len(lengths))
        row.hidden = np.arange(length) < hidden if hidden and i == 0 else None
        places = each.sum(axis=1) - 1
        rows.append(RowPass(row, places, places, each))
    blocks_of_rows = [id(block) for block in blocks.blocks()]
    return sorted(rows, key=lambda row: blocks_of_rows.index(id(row.entries.block)))


def alone(
    row: RowPass, query: torch.Tensor, keys: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Attention of the tokens of a row to its entries, and to each other by what they see."""
    [(own_keys, own_values)] = row.entries.first(row.entries.length)
    mask = torch.ones(row.size, row.end, dtype=torch.bool)
    mask[:, row.entries.length :] = torch.from_numpy(row.visible)
    if row.entries.hidden is not None:
        mask[:, : row.entries.length] &= ~torch.from_numpy(row.entries.hidden)
    if window is not None:
        length = row.entries.length
        places = torch.from_numpy(np.concatenate([np.arange(length), length + row.places]))
        mask &= places[length:, None] - places < window
    repeated = query.shape[1] // keys.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        torch.cat([own_keys, keys], dim=2).repeat_interleave(repeated, dim=1),
        torch.cat([own_values, -keys], dim=2).repeat_interleave(repeated, dim=1),
        attn_mask=mask,
    )


def check(rows: list[RowPass], heads: int, unused: int = 0, window: int | None = None) -> None:
    """`unused` tokens of the pass belong to no row."""
    size = sum(row.size for row in rows) + unused
    query, keys = torch.randn(1, heads, size, 4), torch.randn(1, 2, size, 4)
    packed, expected, begin = PackedPass(rows, torch.device("cpu"), [window], unused), [], 0
    for row in rows:
        end = begin + row.size
        expected.append(alone(row, query[:, :, begin:end], keys[:, :, begin:end], window))
        begin = end
    packed.update(0, keys, -keys)
    given = PackedMask.of(packed, torch.device("cpu")).to(torch.float32)  # as models may cast it
    attended = torch.nn.functional.scaled_dot_product_attention(query, keys, keys, attn_mask=given)
    torch.testing.assert_close(attended[:, :, :begin], torch.cat(expected, dim=2))
    assert attended.shape == query.shape and not attended[:, :, begin:].any()


LARGE = np.tri(40, dtype=np.bool_)
row_lists = st.lists(
    st.tuples(st.integers(2, 400), st.sampled_from([ONE, TREE, CHAIN, NOTHING, LARGE])), min_size=1
)
# By their sizes, rows attend together or one by one.
SHAPES = [[(8, ONE)] * 4, [(8, TREE)] * 3, [(250, LARGE), (3, ONE), (400, ONE), (256, ONE)]]


@settings(max_examples=150)
@given(
    rows=st.one_of(st.sampled_from(SHAPES), row_lists),
    heads=st.sampled_from([2, 4, 6]),
    hidden=st.sampled_from([0, 2]),
    window=st.sampled_from([None, 2, 6]),
    unused=st.integers(0, 3),
    seed=st.integers(0, 100),
)
def test_packed_rows_attend_to_their_own_entries_alone(rows, heads, hidden, window, unused, seed):
    torch.manual_seed(seed)
    if any(len(visible) for _, visible in rows):
        lengths, visible = zip(*rows, strict=True)
        check(rows_of([*lengths], [*visible], hidden), heads, unused, window)


def test_layers_that_attend_to_something_else_than_they_cache_are_noticed():
    query, keys = torch.zeros(1, 2, 1, 4), torch.randn(1, 2, 1, 4)
    packed = PackedPass(rows_of([1], [ONE]), torch.device("cpu"), [None], compares=True)
    with pytest.raises(UnpackableError, match="without having written to the cache"):
        packed.attend(query, keys, keys, None)
    packed.update(0, keys, keys)
    with pytest.raises(UnpackableError, match="other keys"):
        packed.attend(query, keys, keys + 1, None)
    with pytest.raises(UnpackableError, match="without attending"):
        packed.update(1, keys, keys)
    with pytest.raises(UnpackableError, match="calculates with the mask"):
        PackedMask.of(packed, torch.device("cpu")) * 2
