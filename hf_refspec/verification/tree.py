"""All branches of a draft tree in one forward pass (tree attention; REST, arXiv 2311.08252, 3.3).

Rows accept different numbers of tokens, so that soon no two of them are equally long. Each writes
behind its own last token, see `in_place.py`, and attends to its own entries alone. Where the model
attends by torch's attention to what it caches, a pass runs the rows one behind another, costs what
their tokens cost, and pads nothing, see `packed_attention.py`:

    row 0   p p p p x x | r d d d           the pass   r d d d r r d
    row 1   p p x x x x x x | r             of row     0 0 0 0 1 2 2
    row 2   p p p | r d                     p  prompt, x  output, r  root, d  draft nodes

Otherwise (multi-head latent attention, eager attention, arguments that know rows by their number)
rows stand side by side under a 4D mask, and a pass is as wide as its widest row:

    row 0   p p p p x x r d d d             _  what the mask hides: padding of the pass, and what
    row 1   p p x x x x x x r _ _ _            stands behind a row
    row 2   p p p r d _ _
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..transformers_names import USUAL_ARGUMENTS, belongs_to_caller
from .cache import LayerEntries, Pass, find_cache, new_cache
from .in_place import InPlaceEntries, SideBySide, fits_in_place
from .masked_inputs import MaskedInputs, attends_packed, takes_masks
from .model_memo import memo_of
from .packed_attention import PackedMask, PackedPass, UnpackableError
from .prompt_states import last_token, records_prompt
from .row_blocks import rows_of_prompts
from .row_pass import RowPass, rows_of_pass, side_by_side
from .verifier import PassLogits, Verifier

_UNPACKABLE = "attends to something else than it caches"


class TreeVerifier(Verifier):
    """Draft trees of any number of rows. Where it `packs`, rows of other verifiers may join."""

    name = "tree"
    takes_trees = True

    entries: InPlaceEntries

    @classmethod
    def supports(cls, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
        """Needs a cache whose layers keep the text or a sliding window, see also [`takes_masks`].

        The configuration is asked too: a model with chunked attention may be given a cache that
        keeps everything, and would still need another mask; and where rotary frequencies depend on
        the length of the text, some models count the nodes of a tree as that (Phi-3).
        """
        cache = find_cache(model_kwargs)
        return (
            cache is not None
            and takes_masks(model, model_kwargs)
            and fits_in_place(cache)
            and fits_in_place(new_cache(model))
        )

    def _entries(self, cache: Any) -> InPlaceEntries:
        layers = new_cache(self.model).layers
        self._is_usual = self.model_kwargs.keys() <= USUAL_ARGUMENTS
        given = (self.model_kwargs.get(name) for name in ("attention_mask", "position_ids"))
        several = any(each is not None and each.shape[-2] > 1 for each in given)
        self.packs = (
            (self._is_usual or not several)
            and attends_packed(self.model)
            and _UNPACKABLE not in memo_of(self.model)
        )
        return InPlaceEntries(cache, [getattr(each, "sliding_window", None) for each in layers])

    @property
    def kind_of_pass(self) -> str:
        return f"{self.name}, {'packed' if self.packs else 'side by side'}"

    @property
    def joins(self) -> bool:
        """Whether its rows may share passes with those of other verifiers."""
        return self.packs and self._is_usual and not belongs_to_caller(self.cache)

    def join(self, other: TreeVerifier) -> None:
        """Adds the only row of another verifier, which has prefilled it."""
        self.cached = [*self.cached, *other.cached]
        self._offsets = [*self._offsets, *other._offsets]
        self.entries.join(other.entries)
        self._inputs.join(other._inputs)

    def select(self, rows: list[int]) -> None:
        self.cached = [self.cached[i] for i in rows]
        self._offsets = [self._offsets[i] for i in rows]
        self.entries.select(rows)
        self._inputs.select(rows)

    def cached_entries(self, index: int) -> LayerEntries:
        """Keys and values of a row in each layer, `(1, heads, n, head_dim)`; none where a layer's
        prefill has left out what is outside of its window."""
        if any(window is not None for window in self.entries.windows):
            return []
        return self.entries.rows[index].first(self.cached[index])

    def _run_prompts(self, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        """Runs a prompt that several rows have, as in rollouts, once."""
        mask = kwargs.get("attention_mask")
        prompts = input_ids if mask is None else torch.cat([input_ids, mask], dim=1)
        found, of_row = prompts.unique(dim=0, return_inverse=True)
        if len(found) == len(prompts) or not self.joins:
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
        count, length = len(self.cached), int(self.cache.get_seq_length())
        shape = count, self._prompt_length
        self._inputs = MaskedInputs(self.model, self.model_kwargs, self.cache, *shape)
        self._compared = False  # whether a packed pass has attended to what it wrote
        rows = rows_of_prompts(self.model_kwargs, count, length)
        self.entries.prefilled = list(zip(rows, self.prompts, strict=True))
        self.entries.apart = self.packs

    def _run(self, now: Pass) -> PassLogits:
        rows = rows_of_pass(now, self.entries.rows)
        # The next tokens of equally long rows, without drafts, each of which sees all before it.
        plain = (
            min(now.pending) == now.size
            and len({(row.end, row.entries.skipped) for row in rows}) == 1
            and all(row.entries.hidden is None for row in rows)
        )
        if self.packs and not (plain and len(rows) == 1):
            try:
                return self._run_packed(now, rows)
            except UnpackableError:
                self.packs, memo_of(self.model)[_UNPACKABLE] = False, True
                self.entries.bring_together(now.size)
        return self._run_side_by_side(now, rows, plain)

    def _run_packed(self, now: Pass, rows: list[RowPass]) -> PassLogits:
        order = self.entries.order()
        ordered = [rows[i] for i in order]
        sizes = [row.size for row in ordered]
        count, ends = sum(sizes), np.cumsum(sizes).tolist()
        self.pass_tokens = self.padded_size(count)
        unused = self.pass_tokens - count
        roots = [0] * len(order)
        for i, end in zip(order, ends, strict=True):
            roots[i] = end - len(now.drafts[i]) - 1
        skipped = max(min(roots), 0)  # pending tokens before all roots
        device, windows = self._inputs.device, self.entries.windows
        packed = PackedPass(ordered, device, windows, unused, not self._compared)
        each = [row.tokens for row in ordered], [row.places for row in ordered]
        tokens, places, of_row = (
            np.pad(flat, (0, unused), mode="edge")
            for flat in (*map(np.concatenate, each), np.repeat(order, sizes))
        )
        mask, kept = PackedMask.of(packed, device), self.pass_tokens - skipped
        logits = self._logits(packed, tokens[None], places[None], mask, kept, of_row)[0]
        packed.check_attended()
        self._compared = True
        return logits[: count - skipped], [root - skipped for root in roots]

    def _run_side_by_side(self, now: Pass, rows: list[RowPass], plain: bool) -> PassLogits:
        """A `plain` pass takes no mask: it is the very step of plain decoding, or several tokens of
        it at once."""
        running = SideBySide(rows, self.entries.windows, now.size)
        mask = None if plain else self._inputs.masks(running.seen)
        skipped = max(min(now.pending) - 1, 0)
        kept = now.size - skipped
        logits = self._logits(running, *side_by_side(now, rows, now.size), mask, kept)
        roots = [i * kept + pending - 1 - skipped for i, pending in enumerate(now.pending)]
        return logits.flatten(0, 1), roots

    def _logits(
        self,
        running: PackedPass | SideBySide,
        tokens: np.ndarray,
        places: np.ndarray,
        mask: Any,
        kept: int,
        of_row: np.ndarray | None = None,
    ) -> torch.Tensor:
        """One forward pass, see [`~MaskedInputs.of_pass`]; returns the logits of the last `kept`
        tokens, `(R, kept, vocab_size)`."""
        self.entries.running = running
        model_inputs = self._inputs.of_pass(tokens, places, mask, kept, of_row)
        if self.prompt_states is not None and records_prompt(self.model, self.model_kwargs):
            model_inputs["logits_to_keep"] = last_token(self.prompt_states)
        logits: torch.Tensor = self.model(**model_inputs, return_dict=True).logits[:, -kept:]
        return logits
