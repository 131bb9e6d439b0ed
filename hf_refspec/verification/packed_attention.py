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

import numpy as np
import torch
from torch import nn

from .row_blocks import block_size
from .row_pass import RowPass, on_device, seen_entries

# Rows of a block attend in one call if that is at most `_PADDED` times the work of one call a row.
# The call itself takes as long as `_CALL` products of a query and a key.
_PADDED, _CALL = 2.0, 1024
# Models may move, cast and cut a mask.
_UNCHANGED = {"to", "__getitem__", "expand", "contiguous", "float", "bool", "type", "clone"}


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
        for _, alike in groupby(rows, key=_likeness):
            for members in _attending_together([*alike]):
                self._groups.append(RowGroup(members, start, device))
                start += self._groups[-1].size
        # The layer that has written and not yet attended, with its keys and values.
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
            groups = given.shape[1] // own.shape[1]  # each head is given once or several times
            is_same = given.shape[2:] == own.shape[2:] and groups * own.shape[1] == given.shape[1]
            if is_same and self._compares:
                is_same = torch.equal(given, own.repeat_interleave(groups, dim=1))
            if not is_same:
                raise UnpackableError("a layer attends to other keys than it has written")
        self._written, window = None, self._windows[layer]
        if len(self._groups) == 1 and not self._unused:
            return self._groups[0].attend(layer, query, scale, window)
        # The heads of a single token may stand in the place of several tokens.
        sizes = [*(group.size for group in self._groups), self._unused]
        per_token = query.shape[2] // sum(sizes)
        *queries, unused = query.split([per_token * size for size in sizes], dim=2)
        parts = [
            group.attend(layer, q, scale, window)
            for group, q in zip(self._groups, queries, strict=True)
        ]
        return torch.cat([*parts, unused.new_zeros((*unused.shape[:-1], parts[0].shape[-1]))], 2)


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


def _likeness(row: RowPass) -> tuple[int, int]:
    """Rows in which it is equal stand in one block and see about the same number of entries."""
    return id(row.entries.block), block_size(row.end - row.entries.skipped)


def _attending_together(rows: Sequence[RowPass]) -> list[Sequence[RowPass]]:
    """Rows that are alike in the groups that attend in one call each: all of them, or each that has
    tokens by itself."""
    own = [row for row in rows if row.size]
    work = sum(row.size * (row.end - row.entries.skipped) for row in own)
    length = max(row.end for row in rows) - min(row.entries.skipped for row in rows)
    padded = len(rows) * max(row.size for row in rows) * length
    if len(own) > 1 and padded <= _PADDED * work + _CALL * len(rows):
        return [rows]
    return [[row] for row in own]


class RowGroup:
    """Rows that attend in one call: a single one, or several that stand one behind another in a
    block. Their tokens are those of the pass from token `start` on."""

    def __init__(self, rows: Sequence[RowPass], start: int, device: torch.device) -> None:
        self._rows = rows
        self._block, first = rows[0].entries.block, rows[0].entries.at
        self._at = slice(first, first + len(rows))  # their places in the block
        sizes = np.array([row.size for row in rows])
        self.size, self._most = int(sizes.sum()), int(sizes.max())
        self._tokens = slice(start, start + self.size)
        self._end = max(row.end for row in rows)
        places = np.repeat(np.arange(first, first + len(rows)), sizes)
        slots = np.concatenate([np.arange(row.entries.length, row.end) for row in rows])
        self._targets = on_device(places, device), on_device(slots, device)
        # Where rows have fewer tokens than the longest: the tokens that fill up all rows, and which
        # of these are their own.
        self._padded: tuple[torch.Tensor, torch.Tensor] | None = None
        if self._most * len(rows) > self.size:
            ends, steps = np.cumsum(sizes)[:, None], np.arange(self._most)
            wanted = np.clip(ends - sizes[:, None] + steps, 0, ends - 1).clip(0)
            own = np.flatnonzero(steps < sizes[:, None])
            self._padded = on_device(wanted.ravel(), device), on_device(own, device)
        # By window, heads that share keys, device and type: layers may differ in each.
        self._seen: dict[tuple[Any, ...], tuple[slice, torch.Tensor | None]] = {}

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes keys and values `(1, heads, S, head_dim)` of the pass behind the rows."""
        for entries, new in zip(self._block.layers[layer], (keys, values), strict=True):
            at, slots = (index.to(entries.device) for index in self._targets)
            entries.transpose(1, 2)[at, slots] = new[0, :, self._tokens].transpose(0, 1)

    def attend(
        self, layer: int, query: torch.Tensor, scale: float | None, window: int | None
    ) -> torch.Tensor:
        """Attention of the queries `(1, heads, S, head_dim)` of the rows to their own entries."""
        keys, values = self._block.layers[layer]
        seen, mask = self._seen_in(window, query.shape[1] // keys.shape[1], query)
        keys, values = keys[self._at, :, seen], values[self._at, :, seen]
        if len(self._rows) == 1:
            return _attended(query, keys, values, mask, scale)
        count, heads = len(self._rows), query.shape[1]
        if self._padded is not None:
            query = query.index_select(2, self._padded[0].to(query.device))
        query = query.view(heads, count, self._most, -1).transpose(0, 1)  # (rows, heads, S, ...)
        attended = _attended(query, keys, values, mask, scale)
        attended = attended.transpose(0, 1).reshape(1, heads, count * self._most, -1)
        if self._padded is None:
            return attended
        return attended.index_select(2, self._padded[1].to(query.device))

    def _seen_in(
        self, window: int | None, groups: int, query: torch.Tensor
    ) -> tuple[slice, torch.Tensor | None]:
        """The entries that some token sees, and the mask of these as it is added to the scores:
        `(rows, 1, groups * S, length)`, for heads that share keys one behind another."""
        key = window, groups, query.device, query.dtype
        if key not in self._seen:
            begin, mask = min(row.entries.begin(window) for row in self._rows), None
            if not all(row.sees_all(begin, self._end, window) for row in self._rows):
                visible = seen_entries(self._rows, self._most, slice(begin, self._end), window)
                hidden = ~on_device(visible, query.device).repeat(1, groups, 1)[:, None]
                mask = query.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            self._seen[key] = slice(begin, self._end), mask
        return self._seen[key]


def _attended(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Attention of queries `(rows, heads, S, head_dim)` to keys and values of fewer heads, which
    are not repeated: the queries that share a head stand one behind another. Torch's kernel on CPUs
    then takes a fifth of the time in bfloat16, and no more in float32."""
    rows, heads, size, head_dim = query.shape
    grouped = query.reshape(rows, keys.shape[1], -1, head_dim)
    attended = nn.functional.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask, scale=scale
    )
    return attended.reshape(rows, heads, size, values.shape[-1])
