"""Drafts of several rows in one sequence: a pass runs their tokens one behind another, and each row
attends to a cache of its own.

    row 0   p p p p x x | r d d d           the pass   r d d d r r d
    row 1   p p x x x x x x | r             of row     0 0 0 0 1 2 2
    row 2   p p p | r d                     p  prompt, x  output, r  root, d  draft nodes

Nothing is padded: a pass costs what its tokens cost, whichever rows they belong to, and rows of
different lengths join and leave without touching each other's entries.

How the tokens belong together travels as the mask of the pass, which models hand on unseen, and
torch asks a mask of this type to attend, see also `path_attention.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from ..drafting.tree import DraftTree
from .cache import USUAL_ARGUMENTS, Entries, LayerEntries, Pass, find_cache
from .token_sequence import TokenSequence
from .tree import TreeVerifier, row_laid_out

# Slots that a row gets at once beyond those that it needs.
_ROOM = 128


class RowEntries:
    """The keys and values of one row in every layer, `(1, heads, slots, head_dim)`: the first
    `length` slots are kept, and a pass writes behind them. The first tokens of the row are padding
    and `skipped`."""

    def __init__(self, cache: Cache, row: int, skipped: int) -> None:
        self.skipped = skipped
        self._layers = [
            (layer.keys[row : row + 1, :, skipped:], layer.values[row : row + 1, :, skipped:])
            for layer in cache.layers
        ]
        self.length = self._layers[0][0].shape[2]

    def written(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes those of a pass behind the row; returns all of them as views."""
        end = self.length + keys.shape[2]
        kept_keys, kept_values = self._layers[layer]
        if end > kept_keys.shape[2]:
            room = end + _ROOM + end // 8  # grows by a fraction, so that copies stay rare
            kept_keys, kept_values = _grown(kept_keys, room), _grown(kept_values, room)
            self._layers[layer] = kept_keys, kept_values
        kept_keys[:, :, self.length : end] = keys
        kept_values[:, :, self.length : end] = values
        return kept_keys[:, :, :end], kept_values[:, :, :end]

    def keep(self, nodes: Sequence[int]) -> None:
        """Keeps these of the entries behind the row, in this order, and drops the others."""
        start, count = self.length, len(nodes)
        if nodes and nodes[-1] != count - 1:  # they do not stand in place: indices ascend
            source = torch.tensor(nodes) + start
            for layer in self._layers:
                source = source.to(layer[0].device, non_blocking=True)
                for each in layer:
                    each[:, :, start : start + count] = each.index_select(2, source)

    def first(self, length: int) -> LayerEntries:
        """The first entries of each layer."""
        return [(keys[:, :, :length], values[:, :, :length]) for keys, values in self._layers]


def _grown(entries: torch.Tensor, slots: int) -> torch.Tensor:
    """A copy with so many slots; the new ones are zeros, which no mask has to hide from NaN."""
    rows, heads, length, head_dim = entries.shape
    grown = entries.new_zeros((rows, heads, slots, head_dim))
    grown[:, :, :length] = entries
    return grown


class PackedPass:
    """What the layers of one pass share: which of its tokens belong to which row, what they see,
    and, from a layer's cache to its attention, the keys and values of each row."""

    def __init__(
        self, rows: Sequence[RowEntries], sizes: Sequence[int], masks: Sequence[torch.Tensor | None]
    ) -> None:
        self._rows, self._sizes = rows, list(sizes)
        self._masks = list(masks)  # bool (S_i, length_i + S_i); `None` hides nothing
        self._entries: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        # So many heads share keys, for which masks are repeated, on this device: layers may be on
        # several.
        self._masked_for: tuple[int, torch.device] | None = None

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Takes the keys and values `(1, heads, S, head_dim)` of all tokens of the pass."""
        parts = zip(keys.split(self._sizes, dim=2), values.split(self._sizes, dim=2), strict=True)
        self._entries = [
            row.written(layer, *part) for row, part in zip(self._rows, parts, strict=True)
        ]

    def attend(self, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention of each row's queries, of all `(1, heads, S, head_dim)`, to its own entries."""
        if self._entries is None:
            raise RuntimeError("a layer attends without having written to the cache")
        entries, self._entries = self._entries, None
        # Of a single token, the heads that share keys may stand in the place of tokens.
        per_token = query.shape[2] // sum(self._sizes)
        masked_for = query.shape[1] // entries[0][0].shape[1], query.device
        if masked_for != self._masked_for:
            self._repeated = [_repeated(mask, *masked_for) for mask in self._masks]
            self._masked_for = masked_for
        queries = query.split([per_token * size for size in self._sizes], dim=2)
        parts = zip(queries, entries, self._repeated, strict=True)
        return torch.cat(
            [_attended(q, *own, mask, scale) for q, own, mask in parts if q.shape[2]], dim=2
        )


def _repeated(mask: torch.Tensor | None, groups: int, device: torch.device) -> torch.Tensor | None:
    return None if mask is None else mask.repeat(groups, 1).to(device, non_blocking=True)


def _attended(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Attention of a query `(1, heads, S, head_dim)` to keys and values of fewer heads, which are
    not repeated: the queries that share them stand one behind another."""
    _, heads, size, head_dim = query.shape
    grouped = query.reshape(1, keys.shape[1], -1, head_dim)
    attended = nn.functional.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask, scale=scale
    )
    return attended.reshape(1, heads, size, values.shape[-1])


class PackedMask(torch.Tensor):
    """The mask of a pass, by which attention finds what the tokens of the pass belong to."""

    packed: PackedPass

    @classmethod
    def of(cls, packed: PackedPass, device: torch.device) -> PackedMask:
        # Of four dimensions, since models hand on such masks as they are.
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
            return mask.packed.attend(args[0], kwargs.get("scale"))
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, cls) and isinstance(mask, cls):
            result.packed = mask.packed  # moved to another device, or cut
        return result


class _PackedLayer(DynamicLayer):
    """A layer of the cache that hands all keys and values to the pass."""

    def __init__(self, entries: PackedRows, index: int) -> None:
        super().__init__()
        self._all, self._index = entries, index

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._all.running.update(self._index, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return max((row.length for row in self._all.rows), default=0)


class PackedRows(Entries):
    """The entries of rows that each have a cache of their own. They do not return into the
    rectangle that plain decoding would leave."""

    running: PackedPass  # the pass that the layers write for
    padding: list[int]  # of each row of the prefill

    def begin(self, prompt_length: int) -> None:
        self.rows = [RowEntries(self.cache, row, skip) for row, skip in enumerate(self.padding)]
        self.cache.layers = [_PackedLayer(self, i) for i in range(len(self.cache.layers))]

    def before(self, now: Pass) -> None:
        for row, count in zip(self.rows, now.cached, strict=True):
            row.length = count - row.skipped

    def keep(self, done: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        for row, nodes in zip(self.rows, done.kept(paths), strict=True):
            row.keep(nodes)
        return done.cached_after(paths)

    def select(self, rows: list[int], cached: list[int]) -> None:
        self.rows = [self.rows[i] for i in rows]

    def join(self, other: Entries, padding: int) -> None:
        """Adds the only row of another cache."""
        self.rows.append(RowEntries(other.cache, 0, padding))
        for layer in other.cache.layers:
            layer.keys = layer.values = None


class PackedVerifier(TreeVerifier):
    """Draft trees of any number of rows, each with a cache of its own, which may join later."""

    name = "packed"
    entries_type = PackedRows
    fewest_rows = 2
    packs = True

    entries: PackedRows

    @classmethod
    def supports(cls, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
        """Needs attention by torch's `scaled_dot_product_attention`, transformers' own forward
        pass, which does not know rows by their number, and a cache that nobody gave, see also
        [`TreeVerifier`]."""
        return (
            getattr(model.config, "_attn_implementation", None) == "sdpa"
            and type(model).forward.__module__.startswith("transformers.")
            and not getattr(find_cache(model_kwargs), "_is_user_defined", False)
            and model_kwargs.keys() <= USUAL_ARGUMENTS
            and not model._compiled_call_impl
            and super().supports(model, model_kwargs)
        )

    @classmethod
    def of(cls, first: TreeVerifier) -> PackedVerifier:
        """Goes on with the row that another verifier has prefilled, and takes its cache."""
        verifier = cls(first.model, first.generation_config, first.model_kwargs)
        verifier.cached, verifier._offsets, verifier._inputs = (
            first.cached,
            first._offsets,
            first._inputs,
        )
        verifier.entries.padding = first._inputs.padding
        verifier.entries.begin(first.cached[0])
        return verifier

    def join(self, other: TreeVerifier) -> None:
        """Adds such a row."""
        self.cached = [*self.cached, *other.cached]
        self._offsets = [*self._offsets, *other._offsets]
        self.entries.join(other.entries, *other._inputs.padding)
        self._inputs.join(other._inputs)

    def cached_entries(self, index: int) -> LayerEntries:
        """Keys and values of a row in each layer, `(1, heads, n, head_dim)`, without padding."""
        row = self.entries.rows[index]
        return row.first(self.cached[index] - row.skipped)

    def _after_prefill(self, outputs: Mapping[str, Any]) -> None:
        super()._after_prefill(outputs)
        self.entries.padding = self._inputs.padding

    def forward_flat(
        self, rows: Sequence[TokenSequence], drafts: Sequence[DraftTree]
    ) -> tuple[torch.Tensor, list[int]]:
        if not self.cached:
            return super().forward_flat(rows, drafts)
        return super().forward(rows, drafts)[0], self._roots

    def forward(self, rows: Sequence[TokenSequence], drafts: Sequence[DraftTree]) -> torch.Tensor:
        if not self.cached:
            return super().forward(rows, drafts)
        logits, roots = self.forward_flat(rows, drafts)
        wanted = np.array(roots)[:, None] + np.arange(1 + max(map(len, drafts)))
        return logits[torch.from_numpy(np.minimum(wanted, len(logits) - 1)).to(logits.device)]

    def _run(self, now: Pass) -> torch.Tensor:
        """The logits `(1, S, vocab_size)` of all tokens of the pass."""
        inputs = self._inputs
        device = inputs.prompt_mask.device
        laid_out = [
            row_laid_out(*row)
            for row in zip(now.rows, now.drafts, now.cached, now.pending, strict=True)
        ]
        tokens, places, visible = zip(*laid_out, strict=True)
        sizes = [len(each) for each in tokens]
        ends = np.cumsum(sizes)
        self._roots = [
            int(end) - len(draft) - 1 for end, draft in zip(ends, now.drafts, strict=True)
        ]
        self.pass_tokens = int(ends[-1])
        masks = [self._mask(i, each) for i, each in enumerate(visible)]
        self.entries.running = PackedPass(self.entries.rows, sizes, masks)
        of_row = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))
        ids, at = (torch.from_numpy(np.concatenate(each))[None] for each in (tokens, places))
        ids, at = ids.to(device, non_blocking=True), at.to(device, non_blocking=True)
        mask = PackedMask.of(self.entries.running, device)
        model_inputs = inputs.of_pass(ids, at, mask, kept=0, of_row=of_row)
        try:
            return self.model(**model_inputs, return_dict=True).logits
        finally:
            del self.entries.running  # rows may leave and are not kept for the last pass

    def _mask(self, index: int, visible: np.ndarray) -> torch.Tensor | None:
        """What the tokens of a row see of its entries and, by `visible` `(S, S)`, of each other."""
        hidden = self._inputs.hides(index)
        if not hidden and len(visible) == 1:
            return None
        row, prompt_mask = self.entries.rows[index], self._inputs.prompt_mask
        device = prompt_mask.device
        past = torch.ones(row.length, dtype=torch.bool, device=device)
        if hidden:
            seen = prompt_mask[index, row.skipped :][: row.length]
            past[: len(seen)] = seen
        new = torch.from_numpy(visible).to(device, non_blocking=True)
        return torch.cat([past.expand(len(visible), -1), new], dim=-1)
