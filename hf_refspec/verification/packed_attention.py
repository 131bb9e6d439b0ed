"""Attention of a pass in which rows stand one behind another, each with entries of its own.

The mask of the pass says which tokens belong together. Models hand it on unseen, and torch asks a
mask of this type to attend. No model and no setting is changed, so that nothing has to be put back.
Layers that do not attend to the very keys and values that they cache (DiffLlama, JetMoe, latent
attention) are noticed: [`UnpackableError`].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn

from .block_attention import RowGroup, RowPass, attending_together


class UnpackableError(RuntimeError):
    """Layers attend to something else than they have written to the cache."""


class PackedPass:
    """The state that the layers of one pass share: which of its tokens belong to which row, and
    what they see."""

    def __init__(
        self,
        rows: Sequence[RowPass],
        device: torch.device,
        windows: Sequence[int | None],
        unused: int = 0,
        compares: bool = False,
    ) -> None:
        """`rows` that share a block stand one behind another, in its order. The last `unused`
        tokens of the pass are padding: they belong to no row, and attend to nothing. It `compares`
        what layers attend to with what they have written."""
        self._windows, self._compares = windows, compares
        self.end = max(row.end for row in rows)
        self._unused = unused
        self._groups: list[RowGroup] = []
        start = 0
        for _, block in groupby(rows, key=lambda row: id(row.entries.block)):
            for members in attending_together([*block]):
                self._groups.append(RowGroup(members, start, device))
                start += self._groups[-1].size
        # What has been written and not yet attended to: the layer, its keys and values.
        self._written: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the keys and values `(1, heads, S, head_dim)` of all tokens of the pass."""
        self.check_attended()
        for group in self._groups:
            group.write(layer, keys, values)
        self._written = layer, keys, values
        return keys, values

    def check_attended(self) -> None:
        """Makes sure that what was written last has been attended to."""
        if self._written is not None:
            raise UnpackableError("a layer has written to the cache without attending")

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Attention of each row's queries, of all `(1, heads, S, head_dim)`, to its own entries."""
        if self._written is None:
            raise UnpackableError("a layer attends without having written to the cache")
        layer, *written = self._written
        for own, given in zip(written, (keys, values), strict=True):
            if not _are_same(own, given, self._compares):
                raise UnpackableError("a layer attends to other keys than it has written")
        self._written, window = None, self._windows[layer]
        if len(self._groups) == 1 and not self._unused:
            return self._groups[0].attend(layer, query, scale, window)
        sizes = [*(group.size for group in self._groups), self._unused]
        per_token = query.shape[2] // sum(sizes)
        *queries, unused = query.split([per_token * size for size in sizes], dim=2)
        parts = [
            group.attend(layer, q, scale, window)
            for group, q in zip(self._groups, queries, strict=True)
        ]
        return torch.cat([*parts, unused.new_zeros((*unused.shape[:-1], parts[0].shape[-1]))], 2)


# Models may move, cast and cut a mask.
_UNCHANGED = {"to", "__getitem__", "expand", "contiguous", "float", "bool", "type", "clone"}


class PackedMask(torch.Tensor):
    """The mask of a pass, by which attention finds the rows of its tokens."""

    packed: PackedPass

    @classmethod
    def of(cls, packed: PackedPass, device: torch.device) -> PackedMask:
        # A mask of four dimensions is handed on by models as it is.
        mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device).as_subclass(cls)
        mask.packed = packed
        return mask

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        mask = next((each for each in args if isinstance(each, cls)), kwargs.get("attn_mask"))
        if func is nn.functional.scaled_dot_product_attention and isinstance(mask, cls):
            query, keys, values, *_ = args
            return mask.packed.attend(query, keys, values, kwargs.get("scale"))
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, cls) and isinstance(mask, cls):
            if getattr(func, "__name__", "") not in _UNCHANGED:
                raise UnpackableError("the model calculates with the mask")
            result.packed = mask.packed
        return result


def _are_same(written: torch.Tensor, given: torch.Tensor, compares: bool) -> bool:
    """Whether attention is given what was written, each head once or several times."""
    groups = given.shape[1] // written.shape[1]
    if given.shape[2:] != written.shape[2:] or groups * written.shape[1] != given.shape[1]:
        return False
    return not compares or torch.equal(given, written.repeat_interleave(groups, dim=1))
