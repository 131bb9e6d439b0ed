"""The key-value cache of a target model, and how it keeps the accepted tokens of a pass and drops
the others.

[`CroppedEntries`] crops the end, [`RunningState`] restores the state from before the pass. Entries
that are written in place are in `in_place.py`, those of static caches in `static.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from transformers import (
    Cache,
    DynamicCache,
    DynamicLayer,
    PreTrainedConfig,
    PreTrainedModel,
    StaticCache,
    StaticLayer,
)

from ..drafting.tree import DraftTree
from ..text_config import text_config
from ..transformers_names import CACHE_NAMES, RunningStateLayer, belongs_to_caller, cache_name

# Images, and which tokens attend to them.
_IMAGES = ("pixel_values", "cross_attention_states", "cross_attention_mask")
# Keys and values of each layer, `(rows, heads, length, head_dim)`.
LayerEntries: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
# The tokens for which a fresh static cache has room behind its prompts.
_ROOM = 8


def find_cache(values: Mapping[str, Any]) -> Cache | None:
    """The cache among the arguments or outputs of a forward pass, if it is a `Cache`."""
    caches = (values.get(name) for name in CACHE_NAMES)
    return next((cache for cache in caches if isinstance(cache, Cache)), None)


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """The empty cache that `generate` makes for a model."""
    return DynamicCache(config=text_config(model))


def fresh_kwargs(
    model: PreTrainedModel, given: Mapping[str, Any], mask: torch.Tensor
) -> dict[str, Any]:
    """The keyword arguments of a call with other prompts and an empty cache, of the same kinds as
    those that `generate` prepared for a `given` call. The prompts have the int64 `mask`
    `(R, length)`, 0 where they are padded."""
    name = cache_name(given)
    static = isinstance(given[name], StaticCache)
    cache = (
        StaticCache(config=text_config(model), max_cache_len=mask.shape[1] + _ROOM)
        if static
        else new_cache(model)
    )
    kwargs: dict[str, Any] = {"use_cache": True, name: cache}
    if "logits_to_keep" in given:
        kwargs["logits_to_keep"] = 1
    if given.get("attention_mask") is not None or not mask.all():
        kwargs["attention_mask"] = mask
    if (position_ids := given.get("position_ids")) is not None:
        positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
        # Some models have several positions for each token.
        kwargs["position_ids"] = positions.expand(*position_ids.shape[:-2], *positions.shape)
    if (types := given.get("token_type_ids")) is not None:
        kwargs["token_type_ids"] = types[:1, -1:].expand(mask.shape)
    return kwargs


def is_padded(model_kwargs: Mapping[str, Any]) -> bool:
    """Whether some prompt of a call is padded."""
    mask = model_kwargs.get("attention_mask")
    return mask is not None and not bool(mask.all())


def call_device(model: PreTrainedModel, model_kwargs: Mapping[str, Any]) -> torch.device:
    """The device of a call's tokens. Offloaded weights are on no device between passes, and
    accelerate moves tokens to where they run."""
    for value in model_kwargs.values():
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device("cpu") if model.device.type == "meta" else model.device


def keeps_every_position(cache: Cache) -> bool:
    """Whether every layer keeps one entry per position, `(rows, heads, length, head_dim)`, so that
    entries can be moved and cropped."""
    return (
        all(type(layer) is DynamicLayer for layer in cache.layers)
        and len({layer.get_seq_length() for layer in cache.layers}) <= 1
    )


def caches_images(config: PreTrainedConfig, model_kwargs: Mapping[str, Any]) -> bool:
    """Whether some layers keep images, not the text, and must not be cropped (Mllama): in a call
    that has images, or goes on from a cache that may have."""
    if not getattr(config, "cross_attention_layers", None):
        return False
    has_images = any(model_kwargs.get(name) is not None for name in _IMAGES)
    return has_images or belongs_to_caller(find_cache(model_kwargs))


def holds_running_state(cache: Cache) -> bool:
    """Whether some layer holds a running state, which cannot be cropped."""
    return any(isinstance(layer, RunningStateLayer) for layer in cache.layers)


def has_static_layers(cache: Cache) -> bool:
    """Whether some layer has a fixed length, so that nothing can be cropped from its end."""
    return any(isinstance(layer, StaticLayer) for layer in cache.layers)


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


@dataclass(frozen=True, slots=True)
class Pass:
    """The tokens of R rows in one forward pass: of each its pending tokens, then the nodes of its
    draft."""

    rows: Sequence[TokenSequence]
    drafts: Sequence[DraftTree]
    cached: list[int]  # how many tokens of each row the cache held before
    pending: list[int]  # how many tokens of each row come before its draft
    size: int  # the most tokens that a row has in the pass, S

    @classmethod
    def over(
        cls, rows: Sequence[TokenSequence], drafts: Sequence[DraftTree], cached: list[int]
    ) -> Pass:
        """The next pass over rows of which the cache holds `cached` tokens each."""
        pending = [len(row) - n for row, n in zip(rows, cached, strict=True)]
        size = max(p + len(draft) for p, draft in zip(pending, drafts, strict=True))
        return cls(rows, drafts, cached, pending, size)

    def kept(self, paths: Sequence[list[int] | None]) -> list[list[int]]:
        """The tokens of each row that are accepted, as indices in the pass."""
        return [
            [] if path is None else [*range(p), *(p + node for node in path)]
            for p, path in zip(self.pending, paths, strict=True)
        ]

    def cached_after(self, paths: Sequence[list[int] | None]) -> list[int]:
        """How many tokens of each row the cache holds when those of these paths are kept."""
        return [
            cached if path is None else cached + pending + len(path)
            for cached, pending, path in zip(self.cached, self.pending, paths, strict=True)
        ]


class Entries:
    """A cache that is only added to: no draft was ever run over it."""

    # Whether accepted tokens run again in the next pass.
    reruns = False

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.given = 0  # entries before the prompt: a given cache may hold more than the ids

    def begin(self, prompt_length: int) -> None:
        """Prepares for drafts, after the prefill of prompts of this length."""

    def before(self, now: Pass) -> None:
        """Prepares for a pass."""

    def keep(self, done: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        """Keeps each row's pending tokens and the nodes of its path, see [`Verifier.keep`]; returns
        how many tokens of each row the cache holds then."""
        return done.cached_after(paths)

    def undo(self) -> None:
        """Removes a pass that raised from the layers that it had reached."""

    def crop(self, length: int, excess: int) -> bool:
        """Drops `excess` tokens of a single row, all but the first `length`; returns `False` if
        that is impossible."""
        if self.cache is None or not keeps_every_position(self.cache):
            return False
        self.cache.crop(-max(excess, 0))
        return True

    def close(self, cached: list[int]) -> None:
        """Ends the call: crops the cache to these tokens of each row and restores its layers."""

    def mark(self) -> Callable[[], None]:
        """A function that goes back to the present, any number of times."""
        if self.cache is None:
            return lambda: None
        if keeps_every_position(self.cache):
            return partial(crop_layers, self.cache, self.cache.get_seq_length())
        return partial(restore, self.cache, snapshot(self.cache))


class CroppedEntries(Entries):
    """Entries of one row in order: the rejected ones are cropped from the end."""

    def begin(self, prompt_length: int) -> None:
        # Not before: a sliding window that records through the prefill would keep all of it.
        self.cache.activate_past_recording()

    def before(self, now: Pass) -> None:
        self._width = self.cache.get_seq_length()

    def keep(self, done: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        [path], [draft] = paths, done.drafts
        if path is not None:
            # Also with nothing to drop: it shrinks a recording sliding window back to its size.
            self.cache.crop(len(path) - len(draft))
        return done.cached_after(paths)

    def undo(self) -> None:
        crop_layers(self.cache, self._width)

    def close(self, cached: list[int]) -> None:
        for layer in self.cache.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False


class RunningState(Entries):
    """A state that cannot be cropped (Mamba 2, linear attention). The one from before the draft is
    restored, and the accepted tokens run again together with the next draft, so that a rejection
    costs no pass of its own."""

    reruns = True

    def before(self, now: Pass) -> None:
        self._before = snapshot(self.cache) if len(now.drafts[0]) else None

    def keep(self, done: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        [path], [draft] = paths, done.drafts
        if path is not None and len(path) == len(draft):
            return done.cached_after(paths)
        self.undo()
        return done.cached

    def undo(self) -> None:
        if self._before is not None:
            restore(self.cache, self._before)


def crop_layers(cache: Cache, width: int) -> None:
    """Crops every layer to this width, those that have more."""
    for layer in cache.layers:
        if (excess := layer.get_seq_length() - width) > 0:
            layer.crop(-excess)


def snapshot(cache: Cache) -> list[dict[str, Any]]:
    """The state of the cache itself (some models keep positions or a state there) and of every
    layer. Keys and values grow by concatenation, so that holding on to the tensors is enough;
    running states are written in place and are copied."""
    own = {name: value for name, value in vars(cache).items() if name != "layers"}
    states = [own, *(vars(layer) for layer in cache.layers)]
    return [{name: _copied(value) for name, value in state.items()} for state in states]


def restore(cache: Cache, states: list[dict[str, Any]]) -> None:
    """Puts a cache back to where [`snapshot`] was taken, any number of times."""
    for holder, state in zip((cache, *cache.layers), states, strict=True):
        vars(holder).update({name: _copied(value) for name, value in state.items()})


def _copied(value: Any) -> Any:
    """Running states stand in dictionaries and lists."""
    if isinstance(value, dict):
        return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in value.items()}
    if isinstance(value, list):
        return [v.clone() if isinstance(v, torch.Tensor) else v for v in value]
    return value
