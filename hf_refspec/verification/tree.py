"""All branches of a draft tree in one forward pass (tree attention; REST, arXiv 2311.08252, 3.3).

Rows accept different numbers of tokens, so that soon no two of them are equally long. Each writes
behind its own last token, see `in_place.py`:

    row 0   . . p p p x x x x x r d d    .  left padding of the prompt   r  root
    row 1   p p p p p x x r d _ _ _ _    p  prompt, x  output            d  draft nodes

A 4D attention mask shows each node its ancestors and hides padding, what is behind a row (_), and
what is outside of a sliding window; `position_ids` count each row's own tokens. torch's attention
would repeat all keys under such a mask, for heads that share them: a single row attends as packed
rows do, see `packed_attention.py`, where its model can.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..drafting.tree import DraftTree
from ..text_config import attention_windows, length_dependent_rope, text_config
from ..transformers_names import (
    CACHE_NAMES,
    attention_implementation,
    cache_name,
    has_compiled_call,
)
from .block_attention import RowPass
from .cache import Pass, caches_images, find_cache, new_cache
from .in_place import InPlaceEntries, RunningPass, SideBySide, first_visible, fits_in_place
from .model_memo import memo_of
from .packed_attention import PackedMask, PackedPass, UnpackableError
from .prompt_states import last_token, records_prompt
from .token_sequence import TokenSequence
from .verifier import Verifier

_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
_UNPACKABLE = "attends to something else than it caches"


class TreeVerifier(Verifier):
    """Draft trees of any number of rows under a 4D mask that shows each node its ancestors."""

    name = "tree"
    takes_trees = True
    most_rows = sys.maxsize
    entries_type: type[InPlaceEntries] = InPlaceEntries

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
            and attention_windows(text_config(model)) is not None
        )

    def _entries(self, cache: Any) -> InPlaceEntries:
        layers = new_cache(self.model).layers
        return self.entries_type(cache, [getattr(each, "sliding_window", None) for each in layers])

    def select(self, rows: list[int]) -> None:
        self.cached = [self.cached[i] for i in rows]
        self._offsets = [self._offsets[i] for i in rows]
        self.entries.select(rows, self.cached)
        self._inputs.select(rows)

    def _after_prefill(self, outputs: Mapping[str, Any]) -> None:
        self._inputs = MaskedInputs(self.model, self.model_kwargs, self.cache, self.cached)
        self._windows = attention_windows(text_config(self.model)) or {}
        self._packs = attends_packed(self.model) and _UNPACKABLE not in memo_of(self.model)
        self._compared = False  # whether a packed pass has attended to what it wrote

    def _run(self, now: Pass) -> torch.Tensor:
        pending, cached, inputs = now.pending, now.cached, self._inputs
        side_by_side = SideBySide(self.entries, now.size)
        if min(pending) == now.size and min(cached) == max(cached) and not inputs.is_padded:
            # No draft: the very step of plain decoding, or several tokens of it at once.
            tokens = np.array([row.tail(now.size) for row in now.rows])
            places = np.arange(cached[0], cached[0] + now.size)[None]
            return self._logits(side_by_side, tokens, places, None, kept=1)
        tokens, places, visible = laid_out(now, now.size)
        kept = now.size - pending[0] + 1 if min(pending) == max(pending) else now.size
        if len(now.rows) == 1 and self._packs:
            steps = places[0] - cached[0]
            row = RowPass(self.entries.rows[0], visible[0], steps, self._hidden(0))
            packed = self._packed([row])
            try:
                mask = PackedMask.of(packed, inputs.prompt_mask.device)
                return self._logits(packed, tokens, places, mask, kept)
            except UnpackableError:
                self._packs, memo_of(self.model)[_UNPACKABLE] = False, True
        logits = self._logits(side_by_side, tokens, places, self._masks(places, visible), kept)
        return logits if kept < now.size else from_roots(now, logits)

    def _packed(self, rows: list[RowPass], unused: int = 0) -> PackedPass:
        device = self._inputs.prompt_mask.device
        packed = PackedPass(rows, device, self.entries.windows, unused, not self._compared)
        self._compared = True
        return packed

    def _logits(
        self, running: RunningPass, tokens: np.ndarray, places: np.ndarray, mask: Any, kept: int
    ) -> torch.Tensor:
        """One forward pass over tokens `(R, S)` that stand at these indices of their rows; returns
        the logits of the last `kept`. Without a mask nothing is hidden."""
        self.entries.running = running
        device = self._inputs.prompt_mask.device
        ids = torch.from_numpy(tokens).to(device, non_blocking=True)
        places_on_device = torch.from_numpy(places).to(device, non_blocking=True)
        model_inputs = self._inputs.of_pass(ids, places_on_device, mask, kept)
        if self.prompt_states is not None and records_prompt(self.model, self.model_kwargs):
            model_inputs["logits_to_keep"] = last_token(self.prompt_states)
        logits: torch.Tensor = self.model(**model_inputs, return_dict=True).logits[:, -kept:]
        running.check_attended()
        return logits

    def _masks(self, places: np.ndarray, visible: np.ndarray) -> Any:
        """The mask of tokens at these places of their rows `(R, S)` that see these of each other
        `(R, S, S)`, of shape `(R, 1, S, width)`; where the configuration names types of layers, one
        for each."""
        prompt_mask, entries = self._inputs.prompt_mask, self.entries
        device, prefilled = prompt_mask.device, prompt_mask.shape[1]
        ends = torch.tensor([[row.length] for row in entries.rows])
        size = places.shape[1]
        is_text = prompt_mask.new_ones((len(ends), entries.length + size))
        is_text[:, :prefilled] = prompt_mask[:, : is_text.shape[1]]
        masks = masks_by_kind(
            self._windows,
            is_text,
            (ends + torch.arange(size)).to(device, non_blocking=True),
            torch.from_numpy(places + entries.given).to(device, non_blocking=True),
            torch.from_numpy(visible).to(device, non_blocking=True),
        )
        begin = int(ends.min())
        as_taken = {
            kind: as_attention_takes(
                self.model, mask[..., first_visible(begin, self._windows[kind]) :]
            )
            for kind, mask in masks.items()
        }
        return as_taken.get("", as_taken)

    def _hidden(self, index: int) -> np.ndarray | None:
        """Which entries of a row's prompt are hidden, if any are behind what it skips."""
        skipped = self.entries.rows[index].skipped
        if not self._inputs.hides(index, skipped):
            return None
        hidden: np.ndarray = ~self._inputs.prompt_mask[index, skipped:].numpy(force=True)
        return hidden


class MaskedInputs:
    """The arguments of forward passes after a prefill with these keyword arguments, over R prompts
    of these lengths (padding included), whose mask is given explicitly."""

    def __init__(
        self, model: PreTrainedModel, model_kwargs: dict[str, Any], cache: Any, prompts: list[int]
    ) -> None:
        rows, prompt_length = len(prompts), prompts[0]
        mask, positions = model_kwargs.get("attention_mask"), model_kwargs["position_ids"]
        prefilled = int(cache.get_seq_length())  # of a static cache it is a tensor
        self._model, self._cache = model, cache
        # False where a row is padded, (R, prefilled).
        self.prompt_mask = (
            torch.ones((rows, prefilled), dtype=torch.bool, device=positions.device)
            if mask is None
            else mask[:, :prefilled].to(positions.device, torch.bool)
        )
        self._find_padding()
        # Some models have several positions for each token: (..., R, 1)
        first = positions[..., -1:] - (prompt_length - 1)
        self._first_positions = first.expand(*first.shape[:-2], rows, 1)
        # Token types of output, (R, 1): the last one goes on, "no image" where there are images.
        self._token_types = {
            name: model_kwargs[name][:, -1:]
            if name == "token_type_ids"
            else model_kwargs[name][:, :1] * 0
            for name in _TOKEN_TYPES
            if model_kwargs.get(name) is not None
        }
        given_anew = (*CACHE_NAMES, *_TOKEN_TYPES, "attention_mask", "position_ids")
        self._others = {k: v for k, v in model_kwargs.items() if k not in given_anew}
        self._cache_name = cache_name(model_kwargs)

    def select(self, rows: list[int]) -> None:
        """Keeps these rows alone."""
        index, count = torch.tensor(rows, dtype=torch.int64), len(self.prompt_mask)
        self.prompt_mask = self.prompt_mask[index]
        self._find_padding()
        self._first_positions = self._first_positions[..., index, :]
        self._token_types = {name: types[index] for name, types in self._token_types.items()}
        self._others = {
            name: value[index]
            if isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == count
            else value
            for name, value in self._others.items()
        }

    def join(self, other: MaskedInputs) -> None:
        """Adds the rows of another prefill, with the usual arguments alone."""
        masks = self.prompt_mask, other.prompt_mask
        length = max(mask.shape[1] for mask in masks)
        self.prompt_mask = torch.cat(
            [nn.functional.pad(mask, (0, length - mask.shape[1]), value=True) for mask in masks]
        )
        self._find_padding()
        self._first_positions = torch.cat([self._first_positions, other._first_positions], dim=-2)

    def hides(self, index: int, skipped: int) -> bool:
        """Whether some tokens of a row are hidden beside the `skipped` ones."""
        return self._hidden[index] > skipped

    @property
    def is_padded(self) -> bool:
        return any(self._hidden)

    def _find_padding(self) -> None:
        # For each row, how many tokens are hidden, and how many of these stand before all others.
        hidden, leading = ~self.prompt_mask, self.prompt_mask.cumsum(dim=-1) == 0
        counts = torch.stack([hidden.sum(dim=-1), leading.sum(dim=-1)]).tolist()  # one wait
        self._hidden: list[int] = counts[0]
        self.padding: list[int] = counts[1]

    def of_pass(
        self,
        tokens: torch.Tensor,
        places: torch.Tensor,
        mask: Any,
        kept: int,
        of_row: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """The arguments of a forward pass over tokens `(R, S)` that stand at these places of their
        rows, `(R, S)` or `(1, S)`, under a mask as attention takes it; `None` hides nothing. The
        logits of the last `kept` are wanted, 0 for all. Tokens `(1, S)` of several rows are each
        `of_row` `(S,)`."""
        rows, size = tokens.shape
        first = self._first_positions
        if of_row is not None:
            first = first[..., of_row.to(first.device), 0][..., None, :]
        types = {name: types.expand(rows, size) for name, types in self._token_types.items()}
        model_inputs: dict[str, Any] = self._model.prepare_inputs_for_generation(
            tokens,
            next_sequence_length=size,
            attention_mask=mask,
            position_ids=first + places,
            **{self._cache_name: self._cache},
            **types,
            **self._others,
        )
        if "logits_to_keep" in model_inputs:
            model_inputs["logits_to_keep"] = kept
        return model_inputs


def takes_masks(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Whether passes of a model can be given masks and positions: it needs position ids, an
    attention kernel that takes masks, no images in the cache, and rotary frequencies that do not
    depend on the length of the text."""
    config, mask = text_config(model), model_kwargs.get("attention_mask")
    return (
        model_kwargs.get("position_ids") is not None
        and (mask is None or mask.ndim == 2)
        and attention_implementation(model) in ("sdpa", "eager")
        and not caches_images(config, model_kwargs)
        and not length_dependent_rope(config)
    )


def attends_packed(model: PreTrainedModel) -> bool:
    """Whether attention of a model may be asked by its mask: torch's, in transformers' own forward
    pass, which does not know rows by their number."""
    return (
        attention_implementation(model) == "sdpa"
        and type(model).forward.__module__.startswith("transformers.")
        and not has_compiled_call(model)
    )


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


def as_attention_takes(model: PreTrainedModel, mask: torch.Tensor) -> torch.Tensor:
    """A mask of bool `(R, 1, S, length)` as the model's attention takes it: eager attention adds it
    to the scores, in the model's dtype."""
    if attention_implementation(model) == "sdpa":
        return mask
    bias = torch.zeros(mask.shape, dtype=model.dtype, device=mask.device)
    return bias.masked_fill_(~mask, torch.finfo(model.dtype).min)


def from_roots(now: Pass, logits: torch.Tensor) -> torch.Tensor:
    """Selects from the logits of a pass `(R, S, vocab_size)` those after each row's last pending
    token and after the nodes of its draft, `(R, 1 + T, vocab_size)`."""
    pending, size = np.array(now.pending), 1 + max(map(len, now.drafts))
    if min(pending) == max(pending):
        return logits[:, pending[0] - 1 : pending[0] - 1 + size]
    wanted = np.clip(pending[:, None] - 1 + np.arange(size), 0, logits.shape[1] - 1)
    index = torch.from_numpy(wanted).to(logits.device)
    return logits[torch.arange(len(logits), device=logits.device)[:, None], index]


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


def row_laid_out(
    row: TokenSequence, draft: DraftTree, cached: int, pending: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens of one row in a pass `(S,)`, their indices in the row `(S,)`, and which of them
    each of them sees `(S, S)`; see [`laid_out`]."""
    size, root = pending + len(draft), len(row) - 1
    tokens = np.concatenate((row.tail(pending), draft.tokens), dtype=np.int64)
    places = np.concatenate((np.arange(cached, root + 1), root + draft.depths()), dtype=np.int64)
    visible = np.zeros((size, size), dtype=np.bool_)
    visible[:pending, :pending] = np.tri(pending, dtype=np.bool_)
    visible[pending:, :pending] = True
    visible[pending:, pending:] = draft.ancestors()
    return tokens, places, visible
