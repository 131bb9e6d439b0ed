"""Attention whose sums run in the order of positions, in whatever slots the nodes of a tree stand.

A sum of floating-point numbers depends on its order, and attention sums over slots: a node that
stands behind another branch is rounded otherwise than in the slot that it keeps. Here the last few
tokens before each token of a pass, among them all nodes of its path, are gathered in the order of
their positions; what is further back stands in its own slots and is read there, for all at once:

    slots               p p p p p p p p p r a b c d _     p  text    a, b, c  draft nodes
    c, a child of a     + + + + + + +                     r  root    d           child of b
                                      p p r a c           its path, gathered

The bits then depend on the position of a token and what stands before it, and on nothing else.

The paths travel as the mask of the pass, which models hand on unseen, and torch asks a mask of this
type to attend. No model and no setting is changed for it, so that nothing has to be put back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn


class PathMask(torch.Tensor):
    """The mask of a pass, int64 `(R, 1, S, length + n)`: for each token, whether it sees each slot
    of the cache in place (1 or 0), then the slots of the last `n` tokens of its path, padded with
    -1.

    `scaled_dot_product_attention` with such a mask is [`path_attention`].
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            return _attend(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """[`path_attention`] with the arguments of `scaled_dot_product_attention`."""
    with torch._C.DisableTorchFunctionSubclass():  # torch.compile follows no `as_subclass`
        return path_attention(query, key, value, attn_mask, scale)


def path_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention over the slots that a mask shows and over gathered paths, see [`PathMask`]: of a
    query `(R, heads, S, head_dim)`, and the keys and values `(R, heads, length, head_dim)` of the
    whole cache. Scores are scaled by the inverse root of `head_dim` unless `scale` is given."""
    length, dtype = key.shape[2], value.dtype
    if mask.shape[-1] <= length:
        raise ValueError(f"a mask of {mask.shape[-1]} columns for {length} slots holds no paths")
    seen, paths = mask.split([length, mask.shape[-1] - length], dim=-1)
    near_keys, near_values = _gathered(key, paths).float(), _gathered(value, paths).float()
    query = query.float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    far = query @ key.float().mT  # (R, heads, S, length)
    near = (query[..., None, :] @ near_keys.mT)[..., 0, :]  # (R, heads, S, n)
    visible = torch.cat([seen > 0, paths >= 0], dim=-1)
    scores = torch.cat([far, near], dim=-1).masked_fill(~visible, -torch.inf)
    far, near = scores.softmax(dim=-1).split([length, paths.shape[-1]], dim=-1)
    return (far @ value.float() + (near[..., None, :] @ near_values)[..., 0, :]).to(dtype)


def _gathered(entries: torch.Tensor, paths: torch.Tensor) -> torch.Tensor:
    """Entries `(R, heads, length, head_dim)` at the slots of paths `(R, 1, S, n)`, as
    `(R, heads, S, n, head_dim)`."""
    rows, heads, length, head_dim = entries.shape
    first = torch.arange(rows * heads, device=entries.device).view(rows, heads, 1, 1) * length
    index = first + paths.clamp(min=0)  # (R, heads, S, n)
    copied = entries.reshape(-1, head_dim).index_select(0, index.flatten())
    return copied.view(*index.shape, head_dim)
