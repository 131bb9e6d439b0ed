"""Verification of several rows at once: one forward pass of the target model over a draft for each.

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

from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from ..drafting.tree import DraftTree
from .verifier import CACHE_NAMES, TreeVerification, attention_bias, find_cache

_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class BatchVerification:
    """Forward passes of one target model during one call of `generate` with R rows.

    Args:
        model (`PreTrainedModel`): The target model.
        generation_config (`GenerationConfig`): The call's own; read by the prefill.
        model_kwargs (`dict`): Keyword arguments of the forward pass as `generate` prepared them.

    Attributes:
        cache (`Cache`): Keys and values, laid out as above.
        lengths (`np.ndarray`, int64 of shape `(R,)`): The end of each row in the cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.model = model
        self.generation_config = generation_config
        self.model_kwargs = model_kwargs
        cache = find_cache(model_kwargs)
        assert cache is not None, "supports() is asked first"
        self.cache = cache
        self.lengths = np.zeros(0, dtype=np.int64)  # until the prefill

    @classmethod
    def supports(cls, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
        """Whether it may be tried at all with this model and this cache."""
        mask, position_ids = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        return (
            TreeVerification.supports(model, model_kwargs)
            and (mask is None or mask.ndim == 2)
            and position_ids is not None
            and position_ids.ndim == 2
        )

    def prefill(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Runs the prompts, `(R, prompt_length)`, through the model as `generate` does.

        Returns:
            `torch.Tensor` of shape `(R, vocab_size)`: the logits after each row's last token.
        """
        kwargs = self.model_kwargs
        outputs = self.model._prefill(input_ids, self.generation_config, kwargs)
        rows, prefilled = len(input_ids), self.cache.get_seq_length()
        mask = kwargs.get("attention_mask")
        self._prompt_mask = (  # (R, prefilled): all but the padding
            torch.ones((rows, prefilled), dtype=torch.bool, device=input_ids.device)
            if mask is None
            else mask[:, :prefilled].to(input_ids.device, torch.bool)
        )
        self._padded = not bool(self._prompt_mask.all())
        self._prefilled = prefilled
        self.lengths = np.full(rows, prefilled)
        # A row's position at a place in the cache, less that place.
        last_positions = kwargs["position_ids"][:, -1].expand(rows).numpy(force=True)
        self._offsets = last_positions - (prefilled - 1)
        # Token types of output: the last one goes on, "no image" where there are images.
        self._token_types = {
            name: kwargs[name][:, -1:] if name == "token_type_ids" else kwargs[name][:, :1] * 0
            for name in _TOKEN_TYPES
            if kwargs.get(name) is not None
        }
        given_anew = (*CACHE_NAMES, *_TOKEN_TYPES, "attention_mask", "position_ids")
        self._other_kwargs = {k: v for k, v in kwargs.items() if k not in given_anew}
        self._cache_name = next(name for name in CACHE_NAMES if kwargs.get(name) is self.cache)
        return outputs.logits[:, -1].clone()  # not a view, which would hold on to the prompts'

    @property
    def _device(self) -> torch.device:
        return self._prompt_mask.device

    @property
    def last_positions(self) -> np.ndarray:
        """The position of each row's last token, which is not in the cache, int64 `(R,)`."""
        return self.lengths + self._offsets

    def verify(self, last_tokens: np.ndarray, drafts: list[DraftTree]) -> torch.Tensor:
        """One forward pass over each row's last token and its draft.

        Args:
            last_tokens (`np.ndarray`, int64 of shape `(R,)`): The last token of each row.
            drafts (`list[DraftTree]`): One for each row; T is the number of nodes of the largest.

        Returns:
            `torch.Tensor` of shape `(R, 1 + T, vocab_size)`: 0 after the last token, 1 + i after
            node i of the row's draft. What stands past a row's own nodes means nothing.
        """
        rows, size = len(drafts), 1 + max(map(len, drafts))
        self._size = size
        if size == 1 and not self._padded and (self.lengths == self.cache.get_seq_length()).all():
            return self._run(last_tokens[:, None], self.last_positions[:, None], None)
        # A row's unused nodes repeat its last token, at its position, and are seen by themselves.
        tokens = np.tile(last_tokens[:, None], (1, size))
        depths = np.zeros((rows, size), dtype=np.int64)
        visible = np.tile(np.eye(size, dtype=np.bool_), (rows, 1, 1))
        visible[:, :, 0] = True
        for row, draft in enumerate(drafts):
            nodes = slice(1, 1 + len(draft))
            tokens[row, nodes] = draft.tokens
            depths[row, nodes] = draft.depths()
            visible[row, nodes, nodes] = draft.ancestors()

        mask = self._attention_mask(torch.from_numpy(visible).to(self._device, non_blocking=True))
        positions = self.last_positions[:, None] + depths
        return self._run(tokens, positions, attention_bias(self.model, mask))

    def _run(
        self, tokens: np.ndarray, positions: np.ndarray, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """One forward pass over tokens `(R, S)` at these positions; no mask hides nothing."""
        rows, size = tokens.shape
        types = {name: types.expand(rows, size) for name, types in self._token_types.items()}
        model_inputs = self.model.prepare_inputs_for_generation(
            torch.from_numpy(tokens).to(self._device, non_blocking=True),
            next_sequence_length=size,
            attention_mask=mask,
            position_ids=torch.from_numpy(positions).to(self._device, non_blocking=True),
            **{self._cache_name: self.cache},
            **types,
            **self._other_kwargs,
        )
        if "logits_to_keep" in model_inputs:
            model_inputs["logits_to_keep"] = size
        return self.model(**model_inputs, return_dict=True).logits

    def _attention_mask(self, visible: torch.Tensor) -> torch.Tensor:
        """The cache less padding and holes, and of the draft what `visible` says, `(R, S, S)`.

        Returns:
            `torch.Tensor`, bool of shape `(R, 1, S, cached + S)`.
        """
        rows, size, _ = visible.shape
        cached = self.cache.get_seq_length()
        lengths = torch.from_numpy(self.lengths).to(visible.device, non_blocking=True)
        past = torch.arange(cached, device=visible.device) < lengths[:, None]  # (R, cached)
        past[:, : self._prefilled] &= self._prompt_mask
        return torch.cat([past[:, None].expand(rows, size, cached), visible], dim=-1)[:, None]

    def commit(self, paths: list[list[int] | None]) -> None:
        """Keeps each row's last token and the nodes of its path, and drops all other nodes; `None`
        for a row that stands still."""
        start = self.cache.get_seq_length() - self._size
        if self._size == 1 and None not in paths and (self.lengths == start).all():
            self.lengths = self.lengths + 1  # all stand where they belong
            return
        kept = np.array([0 if path is None else 1 + len(path) for path in paths])  # (R,)
        sources = np.full((len(paths), kept.max()), start)
        for row, path in enumerate(paths):
            if path:
                sources[row, 1 : 1 + len(path)] = start + 1 + np.array(path)
        targets = self.lengths[:, None] + np.arange(kept.max())
        # A row that keeps fewer moves something into its holes, which changes nothing.
        if (sources != targets)[np.arange(kept.max()) < kept[:, None]].any():
            _move_entries(self.cache, sources, targets)
        self.lengths = self.lengths + kept
        self._crop()

    def select(self, rows: list[int]) -> None:
        """Goes on with some of the rows; the others leave the cache and all later passes."""
        index = torch.tensor(rows)
        count = len(self.lengths)
        self.cache.batch_select_indices(index)
        self.lengths, self._offsets = self.lengths[rows], self._offsets[rows]
        self._prompt_mask = self._prompt_mask[index]
        self._padded = not bool(self._prompt_mask.all())
        self._token_types = {name: types[index] for name, types in self._token_types.items()}
        self._other_kwargs = {
            name: value[index]
            if isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == count
            else value
            for name, value in self._other_kwargs.items()
        }
        self._crop()

    def finish(self, output_ids: torch.Tensor) -> None:
        """Leaves the cache as plain decoding would: with all of the output but the last token, the
        padding behind shorter rows among it. It takes one more forward pass if there is any.

        Args:
            output_ids (`torch.Tensor` of shape `(R, n)`): The new tokens and their padding.
        """
        stop = self._prefilled + output_ids.shape[1] - 1
        self.lengths = np.minimum(self.lengths, stop)
        rest = [
            ids[length - self._prefilled : -1].astype(np.int64)
            for ids, length in zip(output_ids.numpy(force=True), self.lengths, strict=True)
        ]
        if any(map(len, rest)):
            first = np.array([ids[0] if len(ids) else 0 for ids in rest])
            self.verify(first, [DraftTree.chain(ids[1:]) for ids in rest])
            self.commit([list(range(len(ids) - 1)) if len(ids) else None for ids in rest])
        self._crop()

    def abandon(self) -> None:
        """Leaves a cache that holds the prompts and nothing else: an exception has ended the call,
        and the rows have no length in common but that."""
        if len(self.lengths):
            self.lengths[:] = self._prefilled
            self._crop()

    def _crop(self) -> None:
        excess = self.cache.get_seq_length() - int(self.lengths.max())
        if excess > 0:
            self.cache.crop(-excess)


def _move_entries(cache: Cache, sources: np.ndarray, targets: np.ndarray) -> None:
    """Moves each row's entries from `sources` to `targets`, `(R, n)`, in every layer."""
    rows = torch.arange(len(sources))[:, None]
    source, target = torch.from_numpy(sources), torch.from_numpy(targets)
    for layer in cache.layers:
        device = layer.keys.device
        rows = rows.to(device, non_blocking=True)
        source = source.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        # The selection is a copy, so that it may overlap with where it goes.
        layer.keys[rows, :, target] = layer.keys[rows, :, source]  # (R, n, heads, head_dim)
        layer.values[rows, :, target] = layer.values[rows, :, source]
