"""Attention of packed rows against attention of each row by itself."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.drafting.tree import DraftTree
from hf_refspec.verification.entries import Block, CachedRow, block_size
from hf_refspec.verification.layouts import AttentionProxy, PackedAttention, UnpackableError
from hf_refspec.verification.passes import FixedTokens, Pass

CPU = torch.device("cpu")
# What a row has in a pass: nothing, or a root with no node, a chain, two branches, a long chain.
NOTHING = None
ONE = DraftTree.empty()
CHAIN = DraftTree.chain([1, 2])
TREE = DraftTree([1, 2], [-1, -1], [1.0, 1.0])
LARGE = DraftTree.chain([*range(39)])


def rows_of(
    lengths: list[int], drafts: list[DraftTree | None], hidden: int = 0
) -> tuple[Pass, list[CachedRow], list[int]]:
    """A pass over rows with entries of these lengths in one layer, and its order, that of their
    blocks; `hidden` of the first entries of the first row are not seen."""
    blocks: dict[int, Block] = {}
    rows = []
    for i, (length, draft) in enumerate(zip(lengths, drafts, strict=True)):
        row = CachedRow(0, length)
        states = [(torch.randn(1, 2, length, 4), torch.randn(1, 2, length, 4))]
        slots = block_size(length + (0 if draft is None else 1 + len(draft)))
        blocks.setdefault(slots, Block(slots)).add(row, states, capacity=len(lengths))
        row.hidden = np.arange(length) < hidden if hidden and i == 0 else None
        rows.append(row)
    texts = [FixedTokens(torch.zeros((1, length + 1), dtype=torch.int64)) for length in lengths]
    pass_ = Pass(texts, drafts, lengths)
    order = [rows.index(row) for block in blocks.values() for row in block.rows]
    return pass_, rows, order


def alone(pass_: Pass, i: int, row: CachedRow, query, keys, window: int | None) -> torch.Tensor:
    """Attention of the tokens of a row to its entries, and to each other by what they see."""
    [(own_keys, own_values)] = row.first(row.length)
    length, size = row.length, pass_.sizes[i]
    mask = torch.ones(size, length + size, dtype=torch.bool)
    mask[:, length:] = torch.from_numpy(pass_.masks[i])
    if row.hidden is not None:
        mask[:, :length] &= ~torch.from_numpy(row.hidden)
    if window is not None:
        places = torch.from_numpy(np.concatenate([np.arange(length), pass_.indices[i]]))
        mask &= places[length:, None] - places < window
    keys_and_values = torch.cat([own_keys, keys], dim=2), torch.cat([own_values, -keys], dim=2)
    return torch.nn.functional.scaled_dot_product_attention(
        query, *keys_and_values, attn_mask=mask, enable_gqa=True
    )


def check(pass_: Pass, rows: list[CachedRow], order: list[int], heads, unused, window) -> None:
    """`unused` tokens of the pass belong to no row."""
    size = sum(pass_.sizes) + unused
    query, keys = torch.randn(1, heads, size, 4), torch.randn(1, 2, size, 4)
    packed, expected, begin = packed_attention(pass_, rows, order, window, unused), [], 0
    for i in order:
        end = begin + pass_.sizes[i]
        part = query[:, :, begin:end], keys[:, :, begin:end]
        expected.append(alone(pass_, i, rows[i], *part, window))
        begin = end
    packed.write(0, keys, -keys)
    mask = AttentionProxy.of(packed, CPU).to(torch.float32)  # as models may cast it
    attended = torch.nn.functional.scaled_dot_product_attention(query, keys, keys, attn_mask=mask)
    torch.testing.assert_close(attended[:, :, :begin], torch.cat(expected, dim=2))
    assert attended.shape == query.shape and not attended[:, :, begin:].any()


def packed_attention(pass_, rows, order, window=None, unused=0, compares=False) -> PackedAttention:
    return PackedAttention(pass_, rows, order, [window], {}, CPU, unused, compares)


row_lists = st.lists(
    st.tuples(st.integers(2, 400), st.sampled_from([ONE, TREE, CHAIN, NOTHING, LARGE])), min_size=1
)
# By their sizes, rows attend together or one by one.
SHAPES = [[(8, ONE)] * 4, [(8, TREE)] * 3, [(250, LARGE), (3, ONE), (400, ONE), (256, ONE)]]


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
    if any(draft is not None for _, draft in rows):
        lengths, drafts = zip(*rows, strict=True)
        check(*rows_of([*lengths], [*drafts], hidden), heads, unused, window)


def test_layers_that_attend_to_something_else_than_they_cache_are_noticed():
    query, keys = torch.zeros(1, 2, 1, 4), torch.randn(1, 2, 1, 4)
    packed = packed_attention(*rows_of([1], [ONE]), compares=True)
    with pytest.raises(UnpackableError, match="without having written to the cache"):
        packed.attend(query, keys, keys, None)
    packed.write(0, keys, keys)
    with pytest.raises(UnpackableError, match="other keys"):
        packed.attend(query, keys[..., :2], keys[..., :2], None)
    packed.attend(query, keys, keys + 1, None)
    with pytest.raises(UnpackableError, match="other keys"):
        packed.check()
    packed.write(0, keys, keys)
    with pytest.raises(UnpackableError, match="without attending"):
        packed.write(1, keys, keys)
    with pytest.raises(UnpackableError, match="calculates with the mask"):
        AttentionProxy.of(packed, CPU) * 2
