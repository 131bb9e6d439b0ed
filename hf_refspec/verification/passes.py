"""A pass: the tokens of R rows in one forward pass of the target model, its arguments and results.

row 0   p p p p x x | r d d d        p  prompt, x  output, both cached
row 1   p p x x x x | x r            x, r  pending: not yet cached; r  the root, the last token
row 2   p p p | r d                  d  draft nodes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from ..drafting.tree import DraftTree
from ..kernels.pass_kernels import has_quantised_weights, pass_kernels
from ..text_config import attention_windows, text_config
from ..transformers_names import CACHE_NAMES, attention_implementation, cache_name, prefill
from .caches import find_cache, holds_running_state

# Arrays of one copy begin at multiples of this number of bytes, as compiled kernels expect.
_ALIGNMENT = 64
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class UnverifiableError(ValueError):
    """Says why a model's passes over several tokens cannot be verified."""


class TokenSequence(Protocol):
    """The part of a row that a verifier needs."""

    @property
    def ids(self) -> torch.Tensor:
        """All tokens, including padding, int64 of shape `(1, length)`."""

    def tail(self, count: int) -> np.ndarray:
        """The last `count` tokens on the host, int64 of shape `(count,)`."""

    def __len__(self) -> int: ...


class FixedTokens:
    """Tokens `(1, length)` that do not grow."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def tail(self, count: int) -> np.ndarray:
        return self.ids[0, len(self) - count :].numpy(force=True).astype(np.int64)

    def __len__(self) -> int:
        return self.ids.shape[1]


class Pass:
    """The tokens of R rows in one forward pass: of each row its pending tokens, then the nodes of
    its draft.

    Args:
        rows (`Sequence[TokenSequence]`): The texts.
        drafts (`Sequence[DraftTree | None]`): A draft for each; `None` for a row that takes no part
            in the pass, whose last token must not run: the model may have no position for it.
        cached (`list[int]`): The number of tokens of each row that the cache holds.
        least_tokens (`int`): The tokens to which a pass of packed rows is padded, if it has fewer.

    Attributes:
        ends (`list[int]`): The number of tokens of each row that have run after the pass.
        pending (`list[int]`): The number of tokens of each row before its draft.
        sizes (`list[int]`): The number of tokens of each row in the pass, S_i.
        size (`int`): The most tokens that a row has in the pass, S.
        tokens (`list[np.ndarray]`): The ids of each row's tokens, int64 of shape `(S_i,)`.
        indices (`list[np.ndarray]`): The index in its row that each token has, or would have if it
            were accepted, int64 of shape `(S_i,)`.
        is_step (`bool`): True if nothing runs but the last token of each row and its draft.
        skipped (`int`): The tokens of each row before all roots, whose logits nobody needs.
    """

    def __init__(
        self,
        rows: Sequence[TokenSequence],
        drafts: Sequence[DraftTree | None],
        cached: list[int],
        least_tokens: int = 0,
    ) -> None:
        self.rows = rows
        self.ends: list[int] = []
        self.drafts: list[DraftTree] = []
        self.cached = cached
        self.least_tokens = least_tokens
        self.pending: list[int] = []
        self.sizes: list[int] = []
        self.tokens: list[np.ndarray] = []
        self.indices: list[np.ndarray] = []
        for row, draft, cached_tokens in zip(rows, drafts, cached, strict=True):
            own_draft = DraftTree.empty() if draft is None else draft
            end = len(row) if draft is not None else len(row) - 1
            pending = end - cached_tokens
            tokens = row.tail(len(row) - cached_tokens)[:pending]
            steps = np.arange(cached_tokens, end)
            if len(own_draft):
                tokens = np.concatenate((tokens, own_draft.tokens), dtype=np.int64)
                steps = np.concatenate((steps, end - 1 + own_draft.depths()), dtype=np.int64)
            self.ends.append(end)
            self.drafts.append(own_draft)
            self.pending.append(pending)
            self.sizes.append(pending + len(own_draft))
            self.tokens.append(tokens)
            self.indices.append(steps)
        self.size = max(self.sizes)
        self.is_step = max(self.pending) == 1
        self.skipped = max(min(self.pending) - 1, 0)

    @cached_property
    def masks(self) -> list[np.ndarray]:
        """The mask of each row's tokens among themselves, bool of shape `(S_i, S_i)`: pending
        tokens see the earlier ones, nodes all pending tokens and their ancestors (tree
        attention)."""
        masks = []
        for draft, pending, size in zip(self.drafts, self.pending, self.sizes, strict=True):
            mask = np.zeros((size, size), dtype=np.bool_)
            mask[:pending, :pending] = np.tri(pending, dtype=np.bool_)
            mask[pending:, :pending] = True
            mask[pending:, pending:] = draft.ancestors()
            masks.append(mask)
        return masks

    def aligned(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of all rows and their indices, int64 `(R, size)`, filled up with the last."""
        tokens = np.empty((len(self.rows), size), dtype=np.int64)
        indices = np.empty_like(tokens)
        for i, row in enumerate(self.rows):
            count = self.sizes[i]
            if count < size:
                tokens[i] = row.tail(1 + len(row) - self.ends[i])[0]
            tokens[i, :count] = self.tokens[i]
            indices[i] = self.ends[i] - 1
            indices[i, :count] = self.indices[i]
        return tokens, indices

    def roots(self, size: int) -> list[int]:
        """The index of each root among the logits of rows side by side, `size` for each."""
        return [i * size + n - 1 - self.skipped for i, n in enumerate(self.pending)]

    def kept(self, paths: Sequence[list[int] | None]) -> list[list[int]]:
        """The accepted tokens of each row, as indices in the pass."""
        return [
            [] if path is None else [*range(pending), *(pending + node for node in path)]
            for pending, path in zip(self.pending, paths, strict=True)
        ]

    def cached_after(self, paths: Sequence[list[int] | None]) -> list[int]:
        """The number of tokens of each row that the cache holds once these paths are kept."""
        kept = self.kept(paths)
        return [cached + len(row) for cached, row in zip(self.cached, kept, strict=True)]


@dataclass(frozen=True)
class PassResult:
    """The results of a forward pass.

    Attributes:
        logits (`torch.Tensor` of shape `(N, vocab_size)`): The logits of all rows, from the first
            root on, without the pending tokens before it.
        roots (`list[int]`): For each row the index of the logits after its last token, which the
            logits after each node of its draft follow. Without meaning where a row has no token in
            the pass.
        pass_tokens (`int`): The tokens that ran, of all rows and with their padding.
        is_step (`bool`): True if its time is the cost of a step: nothing ran but the last token of
            each row and its draft, and nothing was compiled.
        began (`float`): When it began, by `time.perf_counter`.
        hidden_states (`tuple[torch.Tensor | None, ...]`, *optional*): The hidden states
            `(1, n, hidden_size)` of the n tokens of a single row, pending ones first, as the model
            returned them; `None` where the call does not ask for them.
    """

    logits: torch.Tensor
    roots: list[int]
    pass_tokens: int
    is_step: bool = False
    began: float = 0.0
    hidden_states: tuple[torch.Tensor | None, ...] | None = None


@dataclass(frozen=True)
class Prefill:
    """The forward pass over the prompts, from which later passes continue."""

    model: PreTrainedModel
    model_kwargs: dict[str, Any]  # with the cache that it filled
    outputs: Mapping[str, Any]
    prompt_length: int  # padding included
    prompts: list[int]  # for each row the index of its prompt among those that ran


class Inputs:
    """The arguments of the forward passes after a prefill of R prompts.

    Attributes:
        prompt_length (`int`): The length of the prompts, padding included.
        quantised (`bool`): True if some weight of the model is quantised or sharded.
    """

    def __init__(self, prefill: Prefill) -> None:
        self.model = prefill.model
        self.quantised = has_quantised_weights(prefill.model)
        self.prompt_length = prefill.prompt_length
        # The position of each row's first token, int64 of shape (..., R): some models have several
        # positions for each token.
        self._first = np.zeros(len(prefill.prompts), dtype=np.int64)
        positions = prefill.model_kwargs.get("position_ids")
        if positions is not None:
            last = positions[..., -1].numpy(force=True).astype(np.int64)
            first = last - (self.prompt_length - 1)
            self._first = np.broadcast_to(first, (*first.shape[:-1], len(self._first)))
        else:
            cache = find_cache(prefill.model_kwargs)
            if cache is not None and not holds_running_state(cache):
                self._first += max(cache.get_seq_length() - self.prompt_length, 0)

    def select(self, rows: list[int]) -> None:
        """Keeps these rows alone."""
        self._first = self._first[..., rows]

    def join(self, other: Inputs) -> None:
        """Adds the rows of another prefill, with the usual arguments alone."""
        self._first = np.concatenate([self._first, other._first], axis=-1)

    def last_position(self, row: int, length: int) -> int:
        """The position of the last token of a row that has this length: left padding has no
        position, and a given cache may hold tokens that the ids lack."""
        return length - 1 + int(self._first[..., row].max())


class MaskedInputs(Inputs):
    """The arguments of passes over any number of rows, whose mask and positions are explicit.

    Attributes:
        device (`torch.device`): The device of a pass's tokens.
        windows (`list`): The different windows of the layers, `None` for all tokens: a pass side by
            side has a mask for each.
    """

    def __init__(self, prefill: Prefill) -> None:
        super().__init__(prefill)
        model_kwargs = prefill.model_kwargs
        self.device = model_kwargs["position_ids"].device
        self._windows = attention_windows(text_config(self.model)) or {}
        self.windows: list[int | None] = list(dict.fromkeys(self._windows.values()))
        # Token types of output, (R, 1): the last one, "no image" where there are images.
        self._token_types = {
            name: model_kwargs[name][:, -1:]
            if name == "token_type_ids"
            else model_kwargs[name][:, :1] * 0
            for name in _TOKEN_TYPES
            if model_kwargs.get(name) is not None
        }
        new_in_each_pass = (*CACHE_NAMES, *_TOKEN_TYPES, "attention_mask", "position_ids")
        self._others = {k: v for k, v in model_kwargs.items() if k not in new_in_each_pass}
        self._others[cache_name(model_kwargs)] = find_cache(model_kwargs)

    def select(self, rows: list[int]) -> None:
        index = torch.tensor(rows, dtype=torch.int64, device="cpu")
        index = index.to(self.device, non_blocking=True)
        count = self._first.shape[-1]
        super().select(rows)
        self._token_types = {name: types[index] for name, types in self._token_types.items()}
        self._others = {
            name: value[index.to(value.device)]
            if isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == count
            else value
            for name, value in self._others.items()
        }

    def positions(self, indices: np.ndarray, of_row: np.ndarray | None = None) -> np.ndarray:
        """The positions of tokens with these indices in their rows, `(R, S)`: int64 `(..., R, S)`.
        Tokens `(1, S)` of several rows are each `of_row` `(S,)`."""
        if of_row is None:
            return self._first[..., None] + indices
        return self._first[..., None, of_row] + indices

    def as_models_take(self, masks: Mapping[int | None, torch.Tensor]) -> Any:
        """The mask of each of the [`windows`], bool `(R, S, slots)`, in the form that models take:
        `(R, 1, S, slots)`, and one for each type of layer where the configuration names types."""
        taken = {}
        for layer_type, window in self._windows.items():
            mask = masks[window][:, None]
            if attention_implementation(self.model) != "sdpa":  # eager: it is added to the scores
                bias = torch.zeros(mask.shape, dtype=self.model.dtype, device=mask.device)
                mask = bias.masked_fill_(~mask, torch.finfo(bias.dtype).min)
            taken[layer_type] = mask
        return taken.get("", taken)

    def of_pass(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: Any, kept: int
    ) -> dict[str, Any]:
        """The arguments of a forward pass over tokens `(R, S)` at these positions `(..., R, S)`,
        under a mask of [`as_models_take`]; `None` hides nothing. The logits of the last `kept` are
        wanted, 0 for all."""
        rows, size = tokens.shape
        types = {name: types.expand(rows, size) for name, types in self._token_types.items()}
        by_type = isinstance(mask, dict)
        model_inputs = prepared(
            self.model,
            tokens,
            size,
            kept,
            attention_mask=next(iter(mask.values())) if by_type else mask,
            position_ids=positions,
            **types,
            **self._others,
        )
        if by_type:
            model_inputs["attention_mask"] = mask
        return model_inputs


def prepared(
    model: PreTrainedModel, input_ids: torch.Tensor, size: int, kept: int, **model_kwargs: Any
) -> dict[str, Any]:
    """The arguments of a forward pass over the last `size` tokens of texts `(R, length)`, as
    `generate` has the model prepare them. The logits of the last `kept` are wanted, 0 for all.

    Raises:
        UnverifiableError: If it leaves out some of several tokens, or adds others.
    """
    prepare = model.prepare_inputs_for_generation
    model_inputs: dict[str, Any] = prepare(input_ids, next_sequence_length=size, **model_kwargs)
    tokens = model_inputs.get("input_ids")
    sizes = (size, input_ids.shape[1])  # some run the whole text in each pass
    if size > 1 and (tokens is None or tokens.shape[1] not in sizes):
        raise UnverifiableError(
            f"`{prepare.__qualname__}` cuts the tokens of a pass, or adds others to them"
        )
    if "logits_to_keep" in model_inputs:
        model_inputs["logits_to_keep"] = kept
    return model_inputs


def run_prompts(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    rounds: bool,
) -> Any:
    """The outputs of the first pass, over prompts `(R, n)`, whose products have the bits of the
    model's own calls unless it `rounds` otherwise."""
    quantised = has_quantised_weights(model)
    with pass_kernels(model, quantised, is_prefill=True) if rounds else nullcontext():
        return prefill(model, input_ids, generation_config, model_kwargs)


def hidden_states_of(
    outputs: Mapping[str, Any], tokens: slice
) -> tuple[torch.Tensor | None, ...] | None:
    """The hidden states of these tokens of a pass over a single row, if they were asked for."""
    layers = outputs.get("hidden_states")
    if layers is None:
        return None
    return tuple(None if layer is None else layer[:, tokens] for layer in layers)


def uploaded(arrays: Mapping[Any, np.ndarray], device: torch.device) -> dict[Any, torch.Tensor]:
    """Copies arrays to a device, all in one transfer, for which the host does not wait."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    starts = {}
    size = 0
    for name, array in arrays.items():
        starts[name] = size
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    # Pinned memory goes back to torch's pool, which uses it again once the copy is through.
    pinned = device.type == "cuda"
    staged = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    for name, start in starts.items():
        array = arrays[name]
        there = staged.numpy()[start : start + array.nbytes].view(array.dtype)
        there.reshape(array.shape)[...] = array
    on_device = staged.to(device, non_blocking=True)
    return {
        name: on_device[start : start + arrays[name].nbytes]
        .view(torch.from_numpy(arrays[name]).dtype)
        .view(arrays[name].shape)
        for name, start in starts.items()
    }


def random_numbers(device: torch.device) -> Any:
    """The module that draws from a device's default generator."""
    return torch.random if device.type == "cpu" else torch.get_device_module(device)
