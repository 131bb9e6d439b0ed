"""Drafts of several rows in one sequence: a pass runs their tokens one behind another, and each row
attends to a cache of its own.

    row 0   p p p p x x | r d d d           the pass   r d d d r r d
    row 1   p p x x x x x x | r             of row     0 0 0 0 1 2 2
    row 2   p p p | r d                     p  prompt, x  output, r  root, d  draft nodes

Nothing is padded: a pass costs what its tokens cost, whichever rows they belong to, and rows of
different lengths join and leave without touching each other's entries.

How the tokens belong together travels as the mask of the pass, which models hand on unseen, and
torch asks a mask of this type to attend. No model and no setting is changed for it, so that nothing
has to be put back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicLayer, PreTrainedModel

from ..drafting.tree import DraftTree
from ..transformers_names import (
    USUAL_ARGUMENTS,
    attention_implementation,
    belongs_to_caller,
    has_compiled_call,
)
from .block_attention import BlockPass, RowPass
from .cache import Entries, LayerEntries, Pass, find_cache
from .row_blocks import RowBlocks, RowEntries
from .token_sequence import TokenSequence
from .tree import TreeVerifier, row_laid_out


class PackedPass:
    """The state that the layers of one pass share: which of its tokens belong to which row, and
    what they see."""

    def __init__(self, rows: Sequence[RowPass], device: torch.device, unused: int = 0) -> None:
        """`rows` that share a block stand one behind another, in its order. The last `unused`
        tokens of the pass are padding: they belong to no row, and attend to nothing."""
        self._blocks: list[BlockPass] = []
        self._unused = unused
        start = 0
        for _, group in groupby(rows, key=lambda row: id(row.entries.block)):
            members = [*group]
            if any(row.size for row in members):
                self._blocks.append(BlockPass(members, start, device))
                start += self._blocks[-1].size
        self._layer: int | None = None  # that has written, and attends next

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Takes the keys and values `(1, heads, S, head_dim)` of all tokens of the pass."""
        for block in self._blocks:
            block.write(layer, keys, values)
        self._layer = layer

    def attend(self, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention of each row's queries, of all `(1, heads, S, head_dim)`, to its own entries."""
        if self._layer is None:
            raise RuntimeError("a layer attends without having written to the cache")
        layer, self._layer = self._layer, None
        if len(self._blocks) == 1 and not self._unused:
            return self._blocks[0].attend(layer, query, scale)
        sizes = [*(block.size for block in self._blocks), self._unused]
        per_token = query.shape[2] // sum(sizes)
        *queries, unused = query.split([per_token * size for size in sizes], dim=2)
        parts = [
            block.attend(layer, q, scale) for block, q in zip(self._blocks, queries, strict=True)
        ]
        return torch.cat([*parts, unused.new_zeros((*unused.shape[:-1], parts[0].shape[-1]))], 2)


class PackedMask(torch.Tensor):
    """The mask of a pass, by which attention finds what the tokens of the pass belong to."""

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
    """The entries of rows that each have a length of their own. They do not return into the
    rectangle that plain decoding would leave."""

    running: PackedPass  # the pass that the layers write for
    padding: list[int]  # of each row of the prefill
    prompts: list[int]  # of each row, see `Verifier.prompts`

    def begin(self, prompt_length: int) -> None:
        self.rows: list[RowEntries] = []
        self._blocks = RowBlocks()
        layers = self.cache.layers
        self.cache.layers = [_PackedLayer(self, i) for i in range(len(layers))]
        for prompt, skipped in zip(self.prompts, self.padding, strict=True):
            self._add(layers, prompt, skipped, len(self.padding))

    def before(self, now: Pass) -> None:
        sizes = zip(self.rows, now.cached, now.pending, now.drafts, strict=True)
        for row, cached, pending, draft in sizes:
            row.length = cached - row.skipped
            self._blocks.make_room(row, pending + len(draft))

    def keep(self, done: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        for row, nodes in zip(self.rows, done.kept(paths), strict=True):
            row.keep(nodes)
        return done.cached_after(paths)

    def select(self, rows: list[int], cached: list[int]) -> None:
        for i, row in enumerate(self.rows):
            if i not in rows:
                row.block.remove(row.at)
        self.rows = [self.rows[i] for i in rows]

    def join(self, other: Entries, padding: int) -> None:
        """Adds the only row of another cache."""
        self._add(other.cache.layers, 0, padding, 1)
        for layer in other.cache.layers:
            layer.keys = layer.values = None

    def order(self) -> list[int]:
        """The rows as a pass runs them: those of a block together, as they stand in it."""
        places = {id(row): i for i, row in enumerate(self.rows)}
        return [places[id(row)] for block in self._blocks.blocks() for row in block.rows]

    def _add(self, layers: Sequence[Any], index: int, skipped: int, count: int) -> None:
        states = [
            (each.keys[index : index + 1, :, skipped:], each.values[index : index + 1, :, skipped:])
            for each in layers
        ]
        row = RowEntries(skipped, states[0][0].shape[2])
        self._blocks.add(row, states, capacity=count)
        self.rows.append(row)


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
            attention_implementation(model) == "sdpa"
            and type(model).forward.__module__.startswith("transformers.")
            and not belongs_to_caller(find_cache(model_kwargs))
            and model_kwargs.keys() <= USUAL_ARGUMENTS
            and not has_compiled_call(model)
            and super().supports(model, model_kwargs)
        )

    @classmethod
    def of(cls, first: TreeVerifier) -> PackedVerifier:
        """Goes on with the row that another verifier has prefilled, and takes its cache."""
        verifier = cls(first.model, first.generation_config, first.model_kwargs)
        verifier.cached, verifier._offsets = first.cached, first._offsets
        verifier._inputs = first._inputs
        verifier.entries.padding, verifier.entries.prompts = first._inputs.padding, [0]
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

    def _run_prompts(self, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        """Runs a prompt that several rows have, as in rollouts, once."""
        mask = kwargs.get("attention_mask")
        prompts = input_ids if mask is None else torch.cat([input_ids, mask], dim=1)
        found, of_row = prompts.unique(dim=0, return_inverse=True)
        if len(found) == len(prompts):
            return super()._run_prompts(input_ids, kwargs)
        self.prompts = of_row.tolist()
        first = torch.tensor([self.prompts.index(prompt) for prompt in range(len(found))])
        first = first.to(input_ids.device)  # the rows that stand for their prompts
        for name in ("attention_mask", "position_ids"):
            if (value := kwargs.get(name)) is not None and value.shape[-2] == len(prompts):
                kwargs = {**kwargs, name: value.index_select(-2, first)}
        outputs = super()._run_prompts(input_ids[first], kwargs)
        outputs.logits = outputs.logits[of_row]
        return outputs

    def _after_prefill(self, outputs: Mapping[str, Any]) -> None:
        super()._after_prefill(outputs)
        self.entries.padding, self.entries.prompts = self._inputs.padding, self.prompts

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
        order = self.entries.order()
        laid_out = [
            row_laid_out(now.rows[i], now.drafts[i], now.cached[i], now.pending[i]) for i in order
        ]
        tokens, places, visible = zip(*laid_out, strict=True)
        sizes = [len(each) for each in tokens]
        self._roots = [0] * len(order)
        for i, end in zip(order, np.cumsum(sizes).tolist(), strict=True):
            self._roots[i] = end - len(now.drafts[i]) - 1
        count = sum(sizes)
        self.pass_tokens = self.padded_size(count)
        unused = self.pass_tokens - count
        rows = []
        for i, each in zip(order, visible, strict=True):
            entries, hidden = self.entries.rows[i], None
            if inputs.hides(i):  # tokens of its prompt, behind its padding
                hidden = ~inputs.prompt_mask[i, entries.skipped :]
            rows.append(RowPass(entries, each, hidden))
        self.entries.running = PackedPass(rows, device, unused)
        of_row = torch.from_numpy(np.pad(np.repeat(order, sizes), (0, unused), mode="edge"))
        flat = (np.pad(np.concatenate(each), (0, unused), mode="edge") for each in (tokens, places))
        ids, at = (torch.from_numpy(each)[None] for each in flat)
        ids, at = ids.to(device, non_blocking=True), at.to(device, non_blocking=True)
        mask = PackedMask.of(self.entries.running, device)
        model_inputs = inputs.of_pass(ids, at, mask, kept=0, of_row=of_row)
        try:
            return self.model(**model_inputs, return_dict=True).logits[:, :count]
        finally:
            del self.entries.running  # rows may leave and are not kept for the last pass
