"""Drafts of several rows in one sequence: a pass runs their tokens one behind another, and each row
attends to entries of its own.

    row 0   p p p p x x | r d d d           the pass   r d d d r r d
    row 1   p p x x x x x x | r             of row     0 0 0 0 1 2 2
    row 2   p p p | r d                     p  prompt, x  output, r  root, d  draft nodes

Nothing is padded: a pass costs what its tokens cost, whichever rows they belong to, and rows of
different lengths join and leave without touching each other's entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..drafting.tree import DraftTree
from ..transformers_names import USUAL_ARGUMENTS, belongs_to_caller
from .block_attention import RowPass
from .cache import LayerEntries, Pass, find_cache
from .in_place import InPlaceEntries
from .packed_attention import PackedMask
from .row_blocks import RowBlocks, RowEntries
from .token_sequence import TokenSequence
from .tree import TreeVerifier, attends_packed, row_laid_out


class PackedRows(InPlaceEntries):
    """The entries of rows that each have a length of their own. They do not return into the
    rectangle that plain decoding would leave."""

    padding: list[int]  # of each row of the prefill
    prompts: list[int]  # of each row, see `Verifier.prompts`

    def begin(self, prompt_length: int) -> None:
        for prompt, skipped in zip(self.prompts, self.padding, strict=True):
            self._take_in(self.cache.layers, prompt, skipped, len(self.padding))
        self.replace_layers()

    def before(self, now: Pass) -> None:
        sizes = zip(self.rows, now.cached, now.pending, now.drafts, strict=True)
        for row, cached, pending, draft in sizes:
            row.length = cached - row.skipped
            self.blocks.make_room(row, pending + len(draft))

    def close(self, cached: list[int]) -> None:
        pass

    def join(self, other: InPlaceEntries, padding: int) -> None:
        """Adds the only row of other entries, which are then empty."""
        [row] = other.rows
        joined = RowEntries(padding, row.length - padding)
        states = [
            (keys[:, :, padding:], values[:, :, padding:]) for keys, values in row.first(row.length)
        ]
        self.blocks.add(joined, states, capacity=1)
        self.rows.append(joined)
        other.rows, other.blocks = [], RowBlocks()

    def order(self) -> list[int]:
        """The rows as a pass runs them: those of a block together, as they stand in it."""
        places = {id(row): i for i, row in enumerate(self.rows)}
        return [places[id(row)] for block in self.blocks.blocks() for row in block.rows]


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
            attends_packed(model)
            and not belongs_to_caller(find_cache(model_kwargs))
            and model_kwargs.keys() <= USUAL_ARGUMENTS
            and super().supports(model, model_kwargs)
        )

    @classmethod
    def of(cls, first: TreeVerifier) -> PackedVerifier:
        """Goes on with the row that another verifier has prefilled, and takes its cache."""
        verifier = cls(first.model, first.generation_config, first.model_kwargs)
        verifier._inputs, verifier._compared = first._inputs, False
        verifier.cached, verifier._offsets = first.cached, first._offsets
        verifier.entries.join(first.entries, *first._inputs.padding)
        verifier.entries.replace_layers()
        return verifier

    def join(self, other: TreeVerifier) -> None:
        """Adds such a row."""
        self.cached = [*self.cached, *other.cached]
        self._offsets = [*self._offsets, *other._offsets]
        self.entries.join(other.entries, *other._inputs.padding)
        self._inputs.join(other._inputs)

    @property
    def keeps_all(self) -> bool:
        """Whether no layer's prefill leaves out what is outside of a window."""
        return all(window is None for window in self.entries.windows)

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
        rows = [
            RowPass(self.entries.rows[i], each, at - now.cached[i], self._hidden(i))
            for i, each, at in zip(order, visible, places, strict=True)
        ]
        packed = self.entries.running = self._packed(rows, unused)
        of_row = torch.from_numpy(np.pad(np.repeat(order, sizes), (0, unused), mode="edge"))
        flat = (np.pad(np.concatenate(each), (0, unused), mode="edge") for each in (tokens, places))
        ids, at = (torch.from_numpy(each)[None] for each in flat)
        ids, at = ids.to(device, non_blocking=True), at.to(device, non_blocking=True)
        mask = PackedMask.of(packed, device)
        model_inputs = inputs.of_pass(ids, at, mask, kept=0, of_row=of_row)
        logits: torch.Tensor = self.model(**model_inputs, return_dict=True).logits[:, :count]
        packed.check_attended()
        return logits
