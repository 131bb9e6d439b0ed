"""Rows of any lengths keep their entries, whichever rows grow, join and leave beside them."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.verification.row_blocks import RowBlocks, RowEntries

LAYERS = 2


def random_states(length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of one row, `(1, heads, length, head_dim)`."""
    return [(torch.randn(1, 2, length, 4), torch.randn(1, 1, length, 3)) for _ in range(LAYERS)]


def write(row: RowEntries, states: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Writes behind a row, as a pass does."""
    for own, new in zip(row.block.layers, states, strict=True):
        for entries, each in zip(own, new, strict=True):
            entries[row.at, :, row.length : row.length + each.shape[2]] = each[0]


def joined(states, more):
    return [
        tuple(torch.cat(pair, dim=2) for pair in zip(*both, strict=True))
        for both in zip(states, more, strict=True)
    ]


@given(seed=st.integers(0, 10**6))
def test_rows_keep_their_own_entries_and_nothing_else(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    blocks, rows, expected = RowBlocks(), [], []
    for _ in range(rng.randint(1, 12)):
        if rng.random() < 0.4 or not rows:
            states = random_states(rng.randint(1, 300))
            rows.append(RowEntries(0, states[0][0].shape[2]))
            expected.append(states)
            blocks.add(rows[-1], states, capacity=rng.randint(0, 3))
        elif rng.random() < 0.3:
            leaving = rng.randrange(len(rows))
            row = rows.pop(leaving)
            row.block.remove(row.at)
            del expected[leaving]
        else:
            i, size = rng.randrange(len(rows)), rng.randint(1, 200)
            kept = sorted(rng.sample(range(size), rng.randint(0, size)))
            blocks.make_room(rows[i], size)
            states = random_states(size)
            write(rows[i], states)
            rows[i].keep(kept)
            expected[i] = joined(
                expected[i], [tuple(each[:, :, kept] for each in layer) for layer in states]
            )
        for row, states in zip(rows, expected, strict=True):
            assert row.block.rows[row.at] is row
            for own, wanted in zip(row.first(row.length), states, strict=True):
                assert all(map(torch.equal, own, wanted))
    assert sum(len(block.rows) for block in blocks.blocks()) == len(rows)


@pytest.mark.parametrize("capacity", [0, 4])
def test_rows_of_like_length_stand_in_one_block_and_others_in_longer_ones(capacity):
    blocks, lengths = RowBlocks(), [1, 256, 257, 1000]
    rows = [RowEntries(0, length) for length in lengths]
    for row in rows:
        blocks.add(row, random_states(row.length), capacity=capacity)
    assert rows[0].block is rows[1].block
    assert [row.block.slots for row in rows] == [256, 256, 384, 1296]
    blocks.make_room(rows[0], 300)
    assert rows[0].block is rows[2].block


def test_a_block_without_rows_holds_no_memory():
    blocks, row = RowBlocks(), RowEntries(0, 5)
    blocks.add(row, random_states(5))
    block = row.block
    block.remove(row.at)
    assert not block.layers and not blocks.blocks()
