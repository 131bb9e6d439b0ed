"""Layouts of a pass: how the tokens of its rows are arranged, and what each of them sees.

[`tree_pass`] runs any number of rows, each with a tree of its own. Its rows follow one another
where the model allows it ([`packed`]):

    the pass   r d d d r r d        r  root or pending token, d  draft node
    of row     0 0 0 0 1 2 2

Such a pass costs what its tokens cost, and pads nothing. [`PackedAttention`] attends, for all rows
and every layer: an object that takes the place of the mask, [`AttentionProxy`], says which tokens
belong together. Models pass it through untouched, and torch asks it to attend. No model and no
setting is changed, so that nothing has to be put back. Few tokens attend by the kernel of
`narrow_attention.py`, others by torch's. Layers that do not attend to the very keys and values that
they cache (DiffLlama, JetMoe, latent attention) are noticed: [`UnpackableError`].

Models that this does not suit, eager attention and arguments that know rows by their number take
passes whose rows are [`side_by_side`], as wide as the widest, under a mask:

    row 0   p p p p x x r d d d             p  prompt, x  output, r  root, d  draft nodes
    row 1   p p x x x x x x r _ _ _         _  hidden by the mask: padding of the pass, and what
    row 2   p p p r d _ _                      follows a row

[`~in_order.causal_pass`] runs one row in order, [`~slots.fixed_width_pass`] in a static cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..kernels.pass_kernels import LEAST_SLOTS, attend_narrowly, pass_kernels
from .entries import CachedRow, InPlaceEntries, block_size
from .passes import MaskedInputs, Pass, PassResult, hidden_states_of, uploaded

# Rows of a block attend in one call if that is at most `_EXTRA_WORK` times the work of one call a
# row. The call itself takes as long as `_CALL` products of a query and a key.
_EXTRA_WORK = 2.0
_CALL = 1024
_NOT_ATTENDED = "a layer has written to the cache without attending"
_OTHER_KEYS = "a layer attends to other keys than it has written"
# Models may move, cast and cut a mask.
_UNCHANGED = {"to", "__getitem__", "expand", "contiguous", "float", "bool", "type", "clone"}


def tree_pass(
    model: PreTrainedModel, pass_: Pass, entries: InPlaceEntries, inputs: MaskedInputs
) -> PassResult:
    """All branches of the drafts of any number of rows (tree attention; REST, arXiv 2311.08252,
    3.3): [`packed`] where the model can be, else [`side_by_side`]. One row without a draft takes
    the very step of plain decoding, unless padding makes a pass cheaper."""
    is_plain = len(pass_.rows) == 1 and entries.sees_all(pass_)
    if entries.packs and not (is_plain and pass_.least_tokens <= pass_.size):
        try:
            return packed(model, pass_, entries, inputs)
        except UnpackableError:
            entries.stop_packing(pass_.size)
    return side_by_side(model, pass_, entries, inputs)


def packed(
    model: PreTrainedModel, pass_: Pass, entries: InPlaceEntries, inputs: MaskedInputs
) -> PassResult:
    """One pass over all rows; padding of the pass follows the last of them."""
    rows = entries.rows
    order = sorted(range(len(rows)), key=lambda i: (rows[i].block.slots_per_row, rows[i].at))
    sizes = [pass_.sizes[i] for i in order]
    count = sum(sizes)
    pass_tokens = max(pass_.least_tokens, count)
    unused = pass_tokens - count
    roots = [0] * len(order)
    for i, end in zip(order, np.cumsum(sizes).tolist(), strict=True):
        roots[i] = end - len(pass_.drafts[i]) - 1
    tokens, indices, of_row = (
        np.pad(np.concatenate(parts), (0, unused), mode="edge")
        for parts in (
            [pass_.tokens[i] for i in order],
            [pass_.indices[i] for i in order],
            [np.full(pass_.sizes[i], i) for i in order],
        )
    )
    arrays = {"tokens": tokens[None], "positions": inputs.positions(indices[None], of_row)}
    windows = entries.window_of_layer
    attention = PackedAttention(
        pass_, rows, order, windows, arrays, inputs.device, unused, not entries.compared
    )
    entries.write_by(attention)
    skipped = max(min(roots), 0)  # pending tokens before all roots
    model_inputs = inputs.of_pass(
        attention.tensors["tokens"],
        attention.tensors["positions"],
        AttentionProxy.of(attention, inputs.device),
        kept=pass_tokens - skipped,
    )
    with pass_kernels(model, inputs.quantised):
        outputs = model(**model_inputs, return_dict=True)
    attention.check()
    return PassResult(
        logits=outputs.logits[0, skipped - pass_tokens :][: count - skipped],
        roots=[root - skipped for root in roots],
        pass_tokens=pass_tokens,
        is_step=pass_.is_step,
        hidden_states=hidden_states_of(outputs, slice(count)),
    )


class UnpackableError(RuntimeError):
    """Layers do not attend to the keys and values that they have written to the cache."""


@dataclass(frozen=True)
class Group:
    """Rows that attend in one call: a single one, or several that follow one another in a block."""

    rows: list[CachedRow]
    tokens: slice  # their tokens in the pass
    size: int  # the most tokens that a row has, S
    # By a layer's window: the slots that some token sees, and of each row the first of them and the
    # one after the last, int64 `(rows, 2)`.
    slots: dict[int | None, slice]
    ends: dict[int | None, np.ndarray]


class PackedAttention:
    """The row of each token of a pass and its mask, shared by all layers.

    Attributes:
        end (`int`): The length of the longest row after the pass.
        compares (`bool`): True if layers must attend to the very keys and values that they write.
        tensors (`dict[Any, torch.Tensor]`): The `arrays` of the pass on the device and, by the
            number of the group, what attention needs there: `"at"` and `"slots"` int64 `(tokens,)`,
            where each token is written; where rows have fewer tokens than the longest, `"filled"`,
            the tokens that fill up all rows, and `"own"`, the places of the rows' own among them;
            for each window the mask, bool `(rows, S, slots)`, unless it hides nothing. One copy
            takes all of them there.
    """

    def __init__(
        self,
        pass_: Pass,
        rows: Sequence[CachedRow],
        order: Sequence[int],
        window_of_layer: Sequence[int | None],
        arrays: Mapping[str, np.ndarray],
        device: torch.device,
        unused: int = 0,
        compares: bool = False,
    ) -> None:
        """The `rows` follow one another in the pass in this `order`, block by block. The last
        `unused` tokens are padding: they belong to no row, and attend to nothing."""
        self._window_of_layer = window_of_layer
        self.compares = compares
        self._unused = unused
        self._groups: list[Group] = []
        self.end = max(row.length + size for row, size in zip(rows, pass_.sizes, strict=True))
        self._arrays: dict[Any, np.ndarray] = {**arrays}
        # Rows are alike if they are in one block and see about as many slots.
        likeness = {
            i: (id(row.block), block_size(row.length + size - row.padding))
            for i, (row, size) in enumerate(zip(rows, pass_.sizes, strict=True))
        }
        for _, alike in groupby(order, key=likeness.__getitem__):
            for members in _attending_together(pass_, rows, [*alike]):
                self._add_group(pass_, rows, members)
        self.tensors = uploaded(self._arrays, device)
        # The layer that has written and not yet attended, with its keys and values.
        self._written: tuple[int, torch.Tensor, torch.Tensor] | None = None
        self._equal: list[torch.Tensor] = []  # true for each layer that attended to what it wrote
        # The masks as biases, by the properties in which layers may differ.
        self._biases: dict[tuple[Any, ...], torch.Tensor | None] = {}

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the keys and values `(1, heads, S, head_dim)` of all tokens after their rows."""
        if self._written is not None:
            raise UnpackableError(_NOT_ATTENDED)
        for number, group in enumerate(self._groups):
            cached = group.rows[0].block.layers[layer]
            for tensor, new in zip(cached, (keys, values), strict=True):
                at = self.tensors[number, "at"].to(tensor.device)
                slots = self.tensors[number, "slots"].to(tensor.device)
                tensor.transpose(1, 2)[at, slots] = new[0, :, group.tokens].transpose(0, 1)
        self._written = layer, keys, values
        return keys, values

    def check(self) -> None:
        """Raises an UnpackableError if its layers have attended to anything but what they wrote."""
        if self._written is not None:
            raise UnpackableError(_NOT_ATTENDED)
        if self._equal:  # the host waits once for all layers
            device = self._equal[0].device
            if not torch.stack([equal.to(device) for equal in self._equal]).all():
                raise UnpackableError(_OTHER_KEYS)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Attention of each row's queries, of all `(1, heads, S, head_dim)`, to its own slots."""
        if self._written is None:
            raise UnpackableError("a layer attends without having written to the cache")
        layer, *written = self._written
        for own, attended in zip(written, (keys, values), strict=True):
            groups = attended.shape[1] // own.shape[1]  # each head comes once or several times
            heads = groups * own.shape[1]
            is_same = attended.shape[2:] == own.shape[2:] and heads == attended.shape[1]
            if not is_same:
                raise UnpackableError(_OTHER_KEYS)
            if self.compares:
                self._equal.append((attended == own.repeat_interleave(groups, dim=1)).all())
        self._written = None
        if len(self._groups) == 1 and not self._unused:
            return self._attend_group(0, layer, query, scale)
        # A single token's heads may be laid out as several tokens.
        sizes = [group.tokens.stop - group.tokens.start for group in self._groups]
        per_token = query.shape[2] // (sum(sizes) + self._unused)
        *queries, unused = query.split([per_token * size for size in (*sizes, self._unused)], dim=2)
        parts = [
            self._attend_group(number, layer, part, scale) for number, part in enumerate(queries)
        ]
        return torch.cat([*parts, unused.new_zeros((*unused.shape[:-1], parts[0].shape[-1]))], 2)

    def _add_group(self, pass_: Pass, rows: Sequence[CachedRow], members: list[int]) -> None:
        number = len(self._groups)
        group_rows = [rows[i] for i in members]
        sizes = np.array([pass_.sizes[i] for i in members])
        size = int(sizes.max())
        start = self._groups[-1].tokens.stop if self._groups else 0
        row_ends = np.array([row.length for row in group_rows]) + sizes
        end = int(row_ends.max())
        slots = {}
        ends = {}
        for window in dict.fromkeys(self._window_of_layer):
            firsts = np.array([row.first_slot(window) for row in group_rows])
            begin = int(firsts.min())
            slots[window] = slice(begin, end)
            ends[window] = np.stack((firsts, row_ends), axis=1) - begin
            sees_all = (
                (sizes == 1).all()
                and (row_ends == end).all()
                and (firsts == begin).all()
                and all(row.hidden is None for row in group_rows)
            )
            if not sees_all:
                self._arrays[number, window] = np.stack(
                    [rows[i].mask(pass_, i, size, slots[window], window) for i in members]
                )
        places = np.arange(len(members)) + group_rows[0].at
        self._arrays[number, "at"] = np.repeat(places, sizes)
        self._arrays[number, "slots"] = np.concatenate(
            [np.arange(stop - n, stop) for n, stop in zip(sizes, row_ends, strict=True)]
        )
        if size * len(members) > sizes.sum():
            last = np.cumsum(sizes)[:, None]
            steps = np.arange(size)
            filled = np.clip(last - sizes[:, None] + steps, 0, last - 1).clip(0)
            self._arrays[number, "filled"] = filled.ravel()
            self._arrays[number, "own"] = np.flatnonzero(steps < sizes[:, None])
        tokens = slice(start, start + int(sizes.sum()))
        self._groups.append(Group(group_rows, tokens, size, slots, ends))

    def _attend_group(
        self, number: int, layer: int, query: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Attention of a group's queries `(1, heads, tokens, head_dim)` to the rows' own slots."""
        group = self._groups[number]
        window = self._window_of_layer[layer]
        count = len(group.rows)
        heads = query.shape[1]
        keys, values = group.rows[0].block.layers[layer]
        first = group.rows[0].at
        slots = slice(first, first + count), slice(None), group.slots[window]
        keys = keys[slots]
        values = values[slots]
        is_filled = (number, "filled") in self.tensors
        if is_filled:
            query = query.index_select(2, self.tensors[number, "filled"].to(query.device))
        size = query.shape[2]  # a single token's heads may be laid out as several tokens
        if count > 1:
            query = query.view(heads, count, group.size, -1).transpose(0, 1)  # (rows, heads, S, ..)
        mask = self.tensors.get((number, window))
        # A pass that compares, as a probe's do, also shows that the kernel suits the model.
        least = 0 if self.compares else LEAST_SLOTS
        attended = attend_narrowly(query, keys, values, mask, group.ends[window], scale, least)
        if attended is None:
            attended = self._attend_by_torch(number, window, query, keys, values, scale)
        attended = attended.transpose(0, 1).reshape(1, heads, size, -1)
        if not is_filled:
            return attended
        return attended.index_select(2, self.tensors[number, "own"].to(query.device))

    def _attend_by_torch(
        self,
        number: int,
        window: int | None,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        """Attention of a group's queries `(rows, heads, S, head_dim)` to keys and values of fewer
        heads, which are not repeated: the queries that share a head follow one another. Torch's
        kernel on CPUs then takes a fifth of the time in bfloat16, and no more in float32."""
        rows, heads, size, head_dim = query.shape
        groups = heads // keys.shape[1]
        bias = None
        if (mask := self.tensors.get((number, window))) is not None:
            # As torch adds it to the scores, (rows, 1, groups * S, slots). Layers may differ in
            # window, heads, device and type.
            key = number, window, groups, query.device, query.dtype
            if key not in self._biases:
                hidden = ~mask.to(query.device).repeat(1, groups, 1)[:, None]
                self._biases[key] = query.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            bias = self._biases[key]
        grouped = query.reshape(rows, keys.shape[1], -1, head_dim)
        attended = nn.functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=bias, scale=scale
        )
        return attended.reshape(rows, heads, size, values.shape[-1])


class AttentionProxy(torch.Tensor):
    """Takes the place of a mask: torch asks it to attend."""

    attention: PackedAttention

    @classmethod
    def of(cls, attention: PackedAttention, device: torch.device) -> AttentionProxy:
        # Models pass a mask of four dimensions through as it is.
        proxy = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device).as_subclass(cls)
        proxy.attention = attention
        return proxy

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        proxy = next((value for value in args if isinstance(value, cls)), kwargs.get("attn_mask"))
        if func is nn.functional.scaled_dot_product_attention and isinstance(proxy, cls):
            query, keys, values, *_ = args
            return proxy.attention.attend(query, keys, values, kwargs.get("scale"))
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, cls) and isinstance(proxy, cls):
            if getattr(func, "__name__", "") not in _UNCHANGED:
                raise UnpackableError("the model calculates with the mask")
            result.attention = proxy.attention
        return result


def _attending_together(
    pass_: Pass, rows: Sequence[CachedRow], alike: list[int]
) -> list[list[int]]:
    """The rows that attend in one call: all alike ones, or each that has tokens by itself."""
    active = [i for i in alike if pass_.sizes[i]]
    ends = {i: rows[i].length + pass_.sizes[i] for i in alike}
    work_alone = sum(pass_.sizes[i] * (ends[i] - rows[i].padding) for i in active)
    length = max(ends.values()) - min(rows[i].padding for i in alike)
    work_together = len(alike) * max(pass_.sizes[i] for i in alike) * length
    if len(active) > 1 and work_together <= _EXTRA_WORK * work_alone + _CALL * len(alike):
        return [alike]
    return [[i] for i in active]


def side_by_side(
    model: PreTrainedModel, pass_: Pass, entries: InPlaceEntries, inputs: MaskedInputs
) -> PassResult:
    """Any number of rows, each with its own tree."""
    rows = entries.rows
    size = pass_.size
    end = entries.longest + size
    tokens, indices = pass_.aligned(size)
    arrays: dict[Any, np.ndarray] = {"tokens": tokens, "positions": inputs.positions(indices)}
    lengths = np.array([row.length for row in rows])
    if (lengths != lengths[0]).any():
        arrays["slots"] = lengths[:, None] + np.arange(size)
    firsts = {
        window: min(row.first_slot(window) for row in rows)
        for window in {*inputs.windows, *entries.window_of_layer}
    }
    sees_all = entries.sees_all(pass_)
    for window in () if sees_all else inputs.windows:
        slots = slice(firsts[window], end)
        masks = [row.mask(pass_, i, size, slots, window) for i, row in enumerate(rows)]
        arrays[window] = np.stack(masks)
    tensors = uploaded(arrays, inputs.device)
    entries.write_by(_RowsSideBySide(entries, tensors.get("slots"), firsts, end))
    kept = size - pass_.skipped
    mask = None if sees_all else inputs.as_models_take(tensors)
    model_inputs = inputs.of_pass(tensors["tokens"], tensors["positions"], mask, kept)
    with pass_kernels(model, inputs.quantised):
        outputs = model(**model_inputs, return_dict=True)
    return PassResult(
        logits=outputs.logits[:, -kept:].flatten(0, 1),
        roots=pass_.roots(kept),
        pass_tokens=size * len(rows),
        is_step=pass_.is_step,
        hidden_states=hidden_states_of(outputs, slice(None)),
    )


@dataclass
class _RowsSideBySide:
    """A pass that writes each row's tokens after it, into `slots` `(R, S)` where rows differ in
    length. A layer sees the slots from its window's first on."""

    entries: InPlaceEntries
    slots: torch.Tensor | None
    firsts: Mapping[int | None, int]
    end: int
    compares: bool = False

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes keys and values `(R, heads, S, head_dim)`; returns all that attention sees."""
        entries = self.entries
        count, _, size, _ = keys.shape
        attended = slice(self.firsts[entries.window_of_layer[layer]], self.end)
        cached = entries.rows[0].block.layers[layer]
        for tensor, new in zip(cached, (keys, values), strict=True):
            if self.slots is None:
                tensor[:count, :, self.end - size : self.end] = new
            else:
                rows = torch.arange(count, device=tensor.device)[:, None]
                tensor.transpose(1, 2)[rows, self.slots.to(tensor.device)] = new.transpose(1, 2)
        return cached[0][:count, :, attended], cached[1][:count, :, attended]
