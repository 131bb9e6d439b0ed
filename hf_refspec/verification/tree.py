"""All branches of a draft tree in one forward pass (tree attention; REST, arXiv 2311.08252, 3.3).

Rows accept different numbers of tokens, so that soon no two of them are equally long. The cache
stays a rectangle all the same:

    row 0   . . p p p | x x x x x        .  left padding of the prompt
    row 1   p p p p p | x x _ _ _        p  prompt, x output, in order
    row 2   . p p p p | x x x _ _        _  hole: no query sees it

After every pass the entries that were accepted move down to the end of their own row, and what then
lies past the longest row is cropped. So holes do not gather: a row has as many as it is shorter
than the longest, and the cache is never wider than that. A 4D attention mask hides padding and
holes from every query, and `position_ids` count each row's own tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..drafting.tree import DraftTree
from ..text_config import text_config
from .cache import (
    CACHE_NAMES,
    caches_images,
    crop_layers,
    find_cache,
    keeps_every_position,
    move_entries,
    new_cache,
)
from .positions import attends_locally, length_dependent_rope
from .verifier import TokenSequence, Verifier

_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class TreeVerifier(Verifier):
    """Draft trees of any number of rows under a 4D mask that shows each node its ancestors."""

    name = "tree"
    takes_trees = True
    most_rows = sys.maxsize

    _prompt_mask: torch.Tensor  # (R, prefilled): all but the padding
    _padded: bool
    _given: int  # columns of the cache before the prompt: a given cache may hold more than the ids
    _first_positions: torch.Tensor  # (..., R, 1): some models have several for each token
    _token_types: dict[str, torch.Tensor]  # (R, 1)
    _other_kwargs: dict[str, Any]
    _cache_name: str

    @classmethod
    def supports(cls, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
        """Needs position ids, a masked attention kernel, and a cache whose entries can be moved.

        The configuration is asked too: a model with sliding windows may be given a cache that
        keeps everything, and would still need another mask; and where rotary frequencies depend on
        the length of the text, some models count the nodes of a tree as that (Phi-3).
        """
        cache, mask = find_cache(model_kwargs), model_kwargs.get("attention_mask")
        config = text_config(model)
        return (
            cache is not None
            and model_kwargs.get("position_ids") is not None
            and (mask is None or mask.ndim == 2)
            and getattr(model.config, "_attn_implementation", None) in ("sdpa", "eager")
            and not cache.offloading
            and keeps_every_position(cache)
            and keeps_every_position(new_cache(model))
            and not caches_images(config, model_kwargs)
            and not attends_locally(config)
            and not length_dependent_rope(config)
        )

    def select(self, rows: list[int]) -> None:
        index, count = torch.tensor(rows), len(self.cached)
        self.cache.batch_select_indices(index)
        self.cached = [self.cached[i] for i in rows]
        self._offsets = [self._offsets[i] for i in rows]
        self._prompt_mask = self._prompt_mask[index]
        self._padded = not bool(self._prompt_mask.all())
        self._first_positions = self._first_positions[..., index, :]
        self._token_types = {name: types[index] for name, types in self._token_types.items()}
        self._other_kwargs = {
            name: value[index]
            if isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == count
            else value
            for name, value in self._other_kwargs.items()
        }
        self._crop()

    def abandon(self) -> None:
        """Rows of different lengths have no prefix in common but their prompts."""
        super().abandon()
        if len(self.cached) > 1:
            self.cached = [self._prompt_length] * len(self.cached)
            self._crop()

    def _take_up(self, outputs: Mapping[str, Any]) -> None:
        kwargs, rows = self.model_kwargs, len(self.cached)
        prefilled = int(self.cache.get_seq_length())  # of a static cache it is a tensor
        self._given = prefilled - self._prompt_length
        mask, positions = kwargs.get("attention_mask"), kwargs["position_ids"]
        self._prompt_mask = (
            torch.ones((rows, prefilled), dtype=torch.bool, device=positions.device)
            if mask is None
            else mask[:, :prefilled].to(positions.device, torch.bool)
        )
        self._padded = not bool(self._prompt_mask.all())
        first = positions[..., -1:] - (self._prompt_length - 1)
        self._first_positions = first.expand(*first.shape[:-2], rows, 1)
        # Token types of output: the last one goes on, "no image" where there are images.
        self._token_types = {
            name: kwargs[name][:, -1:] if name == "token_type_ids" else kwargs[name][:, :1] * 0
            for name in _TOKEN_TYPES
            if kwargs.get(name) is not None
        }
        given_anew = (*CACHE_NAMES, *_TOKEN_TYPES, "attention_mask", "position_ids")
        self._other_kwargs = {k: v for k, v in kwargs.items() if k not in given_anew}
        self._cache_name = next(name for name in CACHE_NAMES if kwargs.get(name) is self.cache)

    def _run(self, rows: Sequence[TokenSequence], drafts: Sequence[DraftTree]) -> torch.Tensor:
        pending, cached = self._pending, self.cached
        size = self._size
        if min(pending) == size and min(cached) == max(cached) and not self._padded:
            # No draft: the very step of plain decoding, or several tokens of it at once.
            tokens = np.array([row.tail(size) for row in rows])
            places = np.arange(cached[0], cached[0] + size)[None]
            return self._logits(tokens, places, None, kept=1)
        tokens, places, visible = laid_out(rows, drafts, cached, pending, size)
        mask = self._attention_mask(torch.from_numpy(visible))
        if min(pending) == max(pending):
            return self._logits(tokens, places, mask, kept=size - pending[0] + 1)
        return self._from_roots(self._logits(tokens, places, mask, kept=size))

    def _from_roots(self, logits: torch.Tensor) -> torch.Tensor:
        """Of the logits of a pass `(R, S, vocab_size)` those after each row's last pending token
        and the nodes of its draft, `(R, 1 + T, vocab_size)`."""
        pending, size = np.array(self._pending), 1 + max(map(len, self._drafts))
        if min(pending) == max(pending):
            return logits[:, pending[0] - 1 : pending[0] - 1 + size]
        wanted = np.clip(pending[:, None] - 1 + np.arange(size), 0, logits.shape[1] - 1)
        index = torch.from_numpy(wanted).to(logits.device)
        return logits[torch.arange(len(logits), device=logits.device)[:, None], index]

    @property
    def _size(self) -> int:
        """The tokens of a row in the last pass, S."""
        sizes = zip(self._pending, self._drafts, strict=True)
        return max(pending + len(draft) for pending, draft in sizes)

    def _logits(
        self, tokens: np.ndarray, places: np.ndarray, mask: torch.Tensor | None, kept: int
    ) -> torch.Tensor:
        """One forward pass over tokens `(R, S)` that stand at these indices of their rows, of which
        the logits of the last `kept` are returned; no mask hides nothing."""
        device = self._prompt_mask.device
        ids = torch.from_numpy(tokens).to(device, non_blocking=True)
        places_on_device = torch.from_numpy(places).to(device, non_blocking=True)
        model_inputs = self._model_inputs(ids, places_on_device, mask, kept)
        return self.model(**model_inputs, return_dict=True).logits[:, -kept:]

    def _model_inputs(
        self, tokens: torch.Tensor, places: torch.Tensor, mask: torch.Tensor | None, kept: int
    ) -> dict[str, Any]:
        """The arguments of a forward pass; tokens and places as of [`_logits`]."""
        rows, size = tokens.shape
        types = {name: types.expand(rows, size) for name, types in self._token_types.items()}
        model_inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(
            tokens,
            next_sequence_length=size,
            attention_mask=mask,
            position_ids=self._first_positions + places,
            **{self._cache_name: self.cache},
            **types,
            **self._other_kwargs,
        )
        if "logits_to_keep" in model_inputs:
            model_inputs["logits_to_keep"] = kept
        return model_inputs

    def _attention_mask(self, visible: torch.Tensor) -> torch.Tensor:
        """The cache less padding and holes, and of the new tokens what `visible` says, `(R, S, S)`,
        as the model's attention takes it: eager attention adds it to the scores.

        Returns:
            `torch.Tensor`, bool or of the model's dtype, of shape `(R, 1, S, cached + S)`.
        """
        device = self._prompt_mask.device
        visible = visible.to(device, non_blocking=True)
        rows, size, _ = visible.shape
        width, prefilled = self.cache.get_seq_length(), self._prompt_mask.shape[1]
        ends = torch.tensor(self.cached).to(device, non_blocking=True) + self._given
        past = torch.arange(width, device=device) < ends[:, None]  # (R, cached)
        past[:, :prefilled] &= self._prompt_mask[:, :width]
        mask = torch.cat([past[:, None].expand(rows, size, width), visible], dim=-1)
        return self._as_attention_takes(mask[:, None])

    def _as_attention_takes(self, mask: torch.Tensor) -> torch.Tensor:
        """A mask of bool `(R, 1, S, length)`: eager attention adds it to the scores."""
        if self.model.config._attn_implementation == "sdpa":
            return mask
        bias = torch.zeros(mask.shape, dtype=self.model.dtype, device=mask.device)
        return bias.masked_fill_(~mask, torch.finfo(self.model.dtype).min)

    def _keep(self, paths: Sequence[list[int] | None]) -> None:
        size, cached = self._size, self.cached
        if size == 1 and None not in paths and min(cached) == max(cached):
            return  # all tokens stand where they belong
        pending, ends = self._pending, np.array(cached) + self._given
        start = self.cache.get_seq_length() - size
        kept = [
            [] if path is None else [*range(p), *(p + node for node in path)]
            for p, path in zip(pending, paths, strict=True)
        ]
        longest = max(kept, key=len)
        in_place = (ends == start).all() and all(nodes == longest[: len(nodes)] for nodes in kept)
        if not (in_place and longest == list(range(len(longest)))):
            sources = np.full((len(paths), len(longest)), start)
            for row, nodes in enumerate(kept):
                sources[row, : len(nodes)] += np.array(nodes, dtype=np.int64)
            # A row that keeps fewer moves something into its holes, which changes nothing.
            move_entries(self.cache, sources, ends[:, None] + np.arange(len(longest)))
        self._crop(int(max(end + len(nodes) for end, nodes in zip(ends, kept, strict=True))))

    def _take_back(self) -> None:
        crop_layers(self.cache, max(self.cached) + self._given)

    def _settle(self) -> None:
        # Where no row has ended with a token of its own, all may hold one past the returned ids.
        if self.cached:
            self._crop()

    def _crop(self, width: int | None = None) -> None:
        """Cuts the cache to the width of its longest row."""
        width = max(self.cached) + self._given if width is None else width
        if (excess := self.cache.get_seq_length() - width) > 0:
            self.cache.crop(-excess)


def laid_out(
    rows: Sequence[TokenSequence],
    drafts: Sequence[DraftTree],
    cached: Sequence[int],
    pending: Sequence[int],
    size: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens of a pass `(R, S)`, their indices in their rows `(R, S)`, and which of them each
    of them sees `(R, S, S)`: pending tokens those before them, nodes all pending tokens and their
    ancestors. What a row does not fill repeats its last token, which nothing else sees."""
    count = len(rows)
    tokens = np.zeros((count, size), dtype=np.int64)
    places = np.zeros((count, size), dtype=np.int64)
    visible = np.tile(np.eye(size, dtype=np.bool_), (count, 1, 1))
    for i, (row, draft, p) in enumerate(zip(rows, drafts, pending, strict=True)):
        nodes, root = slice(p, p + len(draft)), len(row) - 1
        tokens[i], places[i] = row.tail(1)[0], root
        tokens[i, :p], places[i, :p] = row.tail(p), np.arange(cached[i], root + 1)
        tokens[i, nodes], places[i, nodes] = draft.tokens, root + draft.depths()
        visible[i, :p, :p] = np.tri(p, dtype=np.bool_)
        visible[i, p:, :p] = True
        visible[i, nodes, nodes] = draft.ancestors()
    return tokens, places, visible
