"""Attention over gathered paths: torch's own result, and bits that slots do not change."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_refspec.verification.path_attention import PathMask

ROWS, HEADS, LENGTH, HEAD_DIM, N = 2, 3, 40, 8, 4
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def entries(seed: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((ROWS, HEADS, count, HEAD_DIM), generator=generator).to(dtype)


def mask_of(seen: torch.Tensor, paths: torch.Tensor) -> PathMask:
    """The mask of what tokens see, `(S, length)`, and of their paths, `(S, n)`, for all rows."""
    mask = torch.cat([seen.long(), paths], dim=-1)
    return mask.expand(ROWS, 1, *mask.shape).as_subclass(PathMask)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_a_text_in_order_has_the_result_of_torch(scale):
    query, key, value = entries(0, 5), entries(1, LENGTH), entries(2, LENGTH)
    places = torch.arange(1, 6)[:, None]  # the first tokens: their paths begin before the text
    slots = torch.arange(LENGTH)
    paths = places - torch.arange(N - 1, -1, -1)
    mask = mask_of(slots <= places - N, paths.clamp(min=-1))
    output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    assert type(output) is torch.Tensor
    expected = scaled_dot_product_attention(
        query, key, value, attn_mask=slots <= places, scale=scale
    )
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_slots_of_a_path(dtype):
    query, key, value = (entries(0, 1, dtype), entries(1, LENGTH, dtype), entries(2, LENGTH, dtype))
    path = torch.arange(30 - N, 30)
    seen = (torch.arange(LENGTH) < 30 - N)[None]
    in_order = scaled_dot_product_attention(query, key, value, attn_mask=mask_of(seen, path[None]))
    for seed in range(5):
        slots = torch.arange(30 - N, LENGTH)
        elsewhere = slots[torch.randperm(len(slots), generator=torch.Generator().manual_seed(seed))]
        moved_key, moved_value = entries(3, LENGTH, dtype), entries(4, LENGTH, dtype)  # of others
        for moved, text in ((moved_key, key), (moved_value, value)):
            moved[:, :, : 30 - N] = text[:, :, : 30 - N]
            moved[:, :, elsewhere[:N]] = text[:, :, path]
        mask = mask_of(seen, elsewhere[None, :N])
        output = scaled_dot_product_attention(query, moved_key, moved_value, attn_mask=mask)
        assert torch.equal(output, in_order)


def test_a_mask_that_does_not_fit_the_cache_raises():
    """A model may cut the mask to the length of its keys, which loses the paths."""
    query, key = entries(0, 5), entries(1, LENGTH)
    mask = mask_of(torch.ones(5, LENGTH), torch.zeros(5, N, dtype=torch.int64))
    with pytest.raises(ValueError, match="no paths"):
        scaled_dot_product_attention(query, key, key, attn_mask=mask[..., :LENGTH])
