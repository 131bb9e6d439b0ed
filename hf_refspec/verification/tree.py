"""All branches of a draft tree in one forward pass (tree attention; REST, arXiv 2311.08252, 3.3).

Rows accept different numbers of tokens, so that soon no two of them are equally long. The cache
stays a rectangle all the same:

    row 0   . . p p p | x x x x x        .  left padding of the prompt
    row 1   p p p p p | x x _ _ _        p  prompt, x output, in order
    row 2   . p p p p | x x x _ _        _  hole: no query sees it

After every pass the accepted entries move down to the end of their own row, and what then lies past
the longest row is cropped, see [`MovedEntries`]. So holes do not gather: a row has as many as it is
shorter than the longest, and the cache is never wider than that. A 4D attention mask hides padding
and holes from every query, and `position_ids` count each row's own tokens.
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
from ..text_config import attends_locally, length_dependent_rope, text_config
from ..transformers_names import CACHE_NAMES, attention_implementation, cache_name
from .cache import (
    Entries,
    MovedEntries,
    Pass,
    caches_images,
    find_cache,
    keeps_every_position,
    new_cache,
)
from .prompt_states import last_token, records_prompt
from .token_sequence import TokenSequence
from .verifier import Verifier

_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class TreeVerifier(Verifier):
    """Draft trees of any number of rows under a 4D mask that shows each node its ancestors."""

    name = "tree"
    takes_trees = True
    most_rows = sys.maxsize
    entries_type: type[Entries] = MovedEntries

    @classmethod
    def supports(cls, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
        """Needs a cache whose entries can be moved, see also [`takes_masks`].

        The configuration is asked too: a model with sliding windows may be given a cache that
        keeps everything, and would still need another mask; and where rotary frequencies depend on
        the length of the text, some models count the nodes of a tree as that (Phi-3).
        """
        cache = find_cache(model_kwargs)
        return (
            cache is not None
            and takes_masks(model, model_kwargs)
            and not cache.offloading
            and keeps_every_position(cache)
            and keeps_every_position(new_cache(model))
            and not attends_locally(text_config(model))
        )

    def select(self, rows: list[int]) -> None:
        self.cached = [self.cached[i] for i in rows]
        self._offsets = [self._offsets[i] for i in rows]
        self.entries.select(rows, self.cached)
        self._inputs.select(rows)

    def _after_prefill(self, outputs: Mapping[str, Any]) -> None:
        self._inputs = MaskedInputs(self.model, self.model_kwargs, self.cache, self.cached)

    def _run(self, now: Pass) -> torch.Tensor:
        pending, cached, inputs = now.pending, now.cached, self._inputs
        if min(pending) == now.size and min(cached) == max(cached) and not inputs.is_padded:
            # No draft: the very step of plain decoding, or several tokens of it at once.
            tokens = np.array([row.tail(now.size) for row in now.rows])
            places = np.arange(cached[0], cached[0] + now.size)[None]
            return self._logits(tokens, places, None, kept=1)
        tokens, places, visible = laid_out(now, now.size)
        mask = self._attention_mask(visible)
        if min(pending) == max(pending):
            return self._logits(tokens, places, mask, kept=now.size - pending[0] + 1)
        return from_roots(now, self._logits(tokens, places, mask, kept=now.size))

    def _logits(
        self, tokens: np.ndarray, places: np.ndarray, mask: torch.Tensor | None, kept: int
    ) -> torch.Tensor:
        """One forward pass over tokens `(R, S)` that stand at these indices of their rows; returns
        the logits of the last `kept`. Without a mask nothing is hidden."""
        device = self._inputs.prompt_mask.device
        ids = torch.from_numpy(tokens).to(device, non_blocking=True)
        places_on_device = torch.from_numpy(places).to(device, non_blocking=True)
        model_inputs = self._inputs.of_pass(ids, places_on_device, mask, kept)
        if self.prompt_states is not None and records_prompt(self.model, self.model_kwargs):
            model_inputs["logits_to_keep"] = last_token(self.prompt_states)
        return self.model(**model_inputs, return_dict=True).logits[:, -kept:]

    def _attention_mask(self, visible: np.ndarray) -> torch.Tensor:
        """The cache less padding and holes, and of the new tokens what `visible` says, `(R, S, S)`,
        as a mask of shape `(R, 1, S, cached + S)`."""
        prompt_mask = self._inputs.prompt_mask
        device, prefilled = prompt_mask.device, prompt_mask.shape[1]
        rows, size, _ = visible.shape
        new = torch.from_numpy(visible).to(device, non_blocking=True)
        width = self.cache.get_seq_length()
        ends = torch.tensor(self.cached).to(device, non_blocking=True) + self.entries.given
        past = torch.arange(width, device=device) < ends[:, None]  # (R, cached)
        past[:, :prefilled] &= prompt_mask[:, :width]
        mask = torch.cat([past[:, None].expand(rows, size, width), new], dim=-1)
        return as_attention_takes(self.model, mask[:, None])


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

    def hides(self, index: int) -> bool:
        """Whether some tokens of a row are hidden that do not stand before all others."""
        return self._hidden[index] > self.padding[index]

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
