"""Draft trees in a static cache, verified by passes of a few fixed widths that can be compiled.

A pass is padded to one of a few widths, so that a growing text compiles nothing new; with
CUDA graphs each width is one graph. Every row writes behind its own last token:

    row 0   . . p p p x x x r d d d _ _ _ _         .  left padding   r  root, d  draft nodes
    row 1   p p p p p x r d _ _ _ _ _ _             p  prompt         _  padding of the pass

`static_cache.py` says what becomes of the rejected nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel, StaticCache

from ..text_config import attention_windows, text_config
from ..transformers_names import belongs_to_caller
from .cache import Pass, find_cache
from .compiled import CompiledForward
from .masked_inputs import MaskedInputs, as_attention_takes, takes_masks
from .static_cache import SlottedEntries, has_begun, is_static, keeps_all
from .token_sequence import TokenSequence
from .tree import row_laid_out
from .verifier import PassLogits, Verifier

# The tokens of a row in a pass. More of them fit drafts closer, and take longer to compile.
WIDTHS = (1, 8, 16, 32, 65)


class StaticVerifier(Verifier):
    """Draft trees of any number of rows in a static cache."""

    name = "static"
    takes_trees = True
    drops_rows = False
    widths: tuple[int, ...] = WIDTHS

    entries: SlottedEntries

    @classmethod
    def supports(cls, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
        """Needs a cache that keeps the whole text or has not begun, see also [`takes_masks`]."""
        cache: Any = find_cache(model_kwargs)
        config = text_config(model)
        return (
            is_static(cache)
            and takes_masks(model, model_kwargs)
            and not getattr(cache, "offloading", False)
            and (keeps_all(cache) or (not has_begun(cache) and _length_is_known(cache, config)))
            and attention_windows(config) is not None
        )

    def _entries(self, cache: Any) -> SlottedEntries:
        self._compiled = CompiledForward(self.model, self.generation_config, self.model_kwargs)
        return SlottedEntries(cache, self._compiled, self.widths[-1], self.same_bits)

    @property
    def most_nodes(self) -> int:
        """As many as the widest pass takes, and as have room behind the longest row."""
        room = self.entries.length - 1 - max(self._ends)  # the last slot is spare
        return max(min(self.widths[-1], room) - 1, 0)

    @property
    def kind_of_pass(self) -> str:
        return f"{self.name}, {'compiled' if self._compiled.is_active else 'eager'}"

    def finish(self, ids: torch.Tensor, own: Sequence[int]) -> None:
        if len(ids) > 1 and self.entries.given + ids.shape[1] > self.entries.length:
            # No slot is spare: rows that stood still have written into the last one. All run the
            # same number of tokens again, so that none is padded.
            last = self.entries.length - 1 - self.entries.given
            self.cached = [min(last, *self.cached)] * len(self.cached)
        super().finish(ids, own)

    def release(self) -> None:
        self.entries.release(len(self.cached))

    @property
    def _ends(self) -> list[int]:
        """The slots behind the rows."""
        return self.entries.ends(self.cached)

    def _prefill(self, rows: Sequence[TokenSequence]) -> PassLogits:
        self.entries.reuse(len(rows))
        return super()._prefill(rows)

    def _after_prefill(self, outputs: Mapping[str, Any]) -> None:
        self._inputs = MaskedInputs(self.model, self.model_kwargs, self.cache, self.cached)
        prompt_mask = self._inputs.prompt_mask  # (R, prefilled)
        shape = len(prompt_mask), self.entries.length
        self._is_text = torch.ones(shape, dtype=torch.bool, device=prompt_mask.device)
        self._is_text[:, : prompt_mask.shape[1]] = prompt_mask
        self._windows = attention_windows(text_config(self.model)) or {}

    def _run(self, now: Pass) -> PassLogits:
        entries, slots = self.entries, self.entries.slots
        for pending, end in zip(now.pending, self._ends, strict=True):
            if pending and end >= entries.length:  # the caller's cache is too short for a text
                raise ValueError(
                    f"The static cache has room for {entries.length} tokens, and a text has "
                    "more. Pass a `StaticCache` with a larger `max_cache_len`."
                )
        width = self._width(now.size)
        self.pass_tokens = width * len(now.rows)
        compiled = self._compiled.is_active and width in self.widths
        if not compiled:
            entries.move()
        tokens, places, visible = laid_out(now, width)
        targets = np.array(self._ends)[:, None] + np.arange(width)
        numbers = [tokens, places, np.minimum(targets, entries.length - 1)]
        moves = entries.moves(len(now.rows)) if compiled and self.takes_trees else []
        *on_device, visible_on_device = self._uploaded([*numbers, *moves], visible)
        token_ids, token_places, slots.targets, *moved = on_device
        slots.moved_from, slots.moved_to = moved or (None, None)
        masks = {
            kind: as_attention_takes(self.model, mask)
            for kind, mask in masks_by_kind(
                self._windows,
                self._is_text,
                slots.targets,
                token_places + entries.given,
                visible_on_device,
            ).items()
        }
        [mask, *_] = masks.values()
        model_inputs = self._inputs.of_pass(token_ids, token_places, mask, kept=0)  # all
        if "" not in masks:  # one for each type of layer
            model_inputs["attention_mask"] = masks
        logits = None
        if compiled:
            logits = self._compiled(model_inputs, width, entries.shape(len(now.rows)))
            self.in_step = self.in_step and not self._compiled.prepared
        if logits is None:
            entries.move()
            slots.moved_from = slots.moved_to = None
            logits = self.model(**model_inputs, return_dict=True).logits
        entries.moved()
        skipped = max(min(now.pending) - 1, 0)
        logits = logits[:, skipped : now.size]
        roots = [i * logits.shape[1] + p - 1 - skipped for i, p in enumerate(now.pending)]
        return logits.flatten(0, 1), roots

    def _width(self, size: int) -> int:
        """The narrowest width for `size` tokens of a row: `size` itself where they reach the last
        slot, so that nothing is padded, and where rows that are brought to one length in the end
        need more than the widest."""
        if max(self._ends) + size >= self.entries.length:
            return size
        return next((width for width in self.widths if width >= size), size)

    def _uploaded(self, numbers: Sequence[np.ndarray], visible: np.ndarray) -> list[torch.Tensor]:
        """Arrays of int64 and one of bool as tensors on the model's device, by one copy."""
        device = self._is_text.device
        packed = np.concatenate([each.ravel().view(np.uint8) for each in (*numbers, visible)])
        on_host = torch.from_numpy(packed)
        if device.type == "cuda":
            on_host = on_host.pin_memory()
        *parts, last = on_host.to(device, non_blocking=True).split(
            [each.nbytes for each in (*numbers, visible)]
        )
        # Copies: each begins where memory is aligned, and no graph sees what it is a view of.
        longs = [
            part.view(torch.int64).view(each.shape).clone()
            for part, each in zip(parts, numbers, strict=True)
        ]
        return [*longs, last.view(torch.bool).view(visible.shape)]


def _length_is_known(cache: StaticCache, config: PreTrainedConfig) -> bool:
    """Whether a cache says how many tokens are to fit: not if the caller gave one whose layers all
    keep a window."""
    window = getattr(config, "sliding_window", None)
    windows = all(layer.is_sliding and layer.max_cache_len == window for layer in cache.layers)
    return not windows or not belongs_to_caller(cache)


def masks_by_kind(
    windows: Mapping[str, int | None],
    is_text: torch.Tensor,
    slots: torch.Tensor,
    places: torch.Tensor,
    visible: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """By type of layer, which of all slots tokens see that are written into these `slots` `(R, S)`,
    bool `(R, 1, S, length)`: those before them that are text `(R, length)`, and of each other the
    `visible` ones `(R, S, S)`; of both none that is outside of the window. A token in its place
    would stand in the slot `places` `(R, S)`."""
    (rows, size), length = places.shape, is_text.shape[1]
    columns = torch.arange(length, device=places.device)
    past = (columns < slots[:, :1]) & is_text  # (R, length)
    index = slots[:, None, None].expand(rows, 1, size, size)
    masks = {}
    for kind, window in windows.items():
        mask, among = past[:, None, None].expand(rows, 1, size, length), visible[:, None]
        if window is not None:
            mask = mask & (places[..., None] - columns < window)[:, None]
            among = among & (places[..., None] - places[:, None] < window)[:, None]
        masks[kind] = mask.scatter(3, index, among)
    return masks


def laid_out(now: Pass, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens of a pass `(R, S)` of this width, their indices in their rows `(R, S)`, and which
    of them each of them sees `(R, S, S)`: pending tokens those before them, nodes all pending
    tokens and their ancestors. The padding of a row repeats its last token, which nothing else
    sees."""
    count = len(now.rows)
    tokens = np.zeros((count, width), dtype=np.int64)
    places = np.zeros((count, width), dtype=np.int64)
    visible = np.tile(np.eye(width, dtype=np.bool_), (count, 1, 1))
    for i, row in enumerate(now.rows):
        own = row_laid_out(row, now.drafts[i], now.cached[i], now.pending[i])
        size = len(own[0])
        tokens[i], places[i] = row.tail(1)[0], len(row) - 1
        tokens[i, :size], places[i, :size], visible[i, :size, :size] = own
        visible[i, size:, : now.pending[i]] = True
    return tokens, places, visible
