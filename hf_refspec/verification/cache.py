"""The key-value cache of a target model: found, copied, moved within and put back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionCacheLayerMixin

from ..text_config import text_config
from .static_cache import new_static_cache

# The names under which transformers' models take their cache.
CACHE_NAMES = ("past_key_values", "cache_params")
# Images, and which tokens attend to them.
_IMAGES = ("pixel_values", "cross_attention_states", "cross_attention_mask")
# Tokens that may follow other prompts in a static cache, whose verifiers make room for theirs.
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
    those of a given call.

    Args:
        model (`PreTrainedModel`): The target model.
        given (`dict`): Keyword arguments of the forward pass as `generate` prepared them.
        mask (`torch.LongTensor` of shape `(R, length)`): Of the other prompts: 0 where they are
            padded.
    """
    name = next(name for name in CACHE_NAMES if given.get(name) is not None)
    static = isinstance(given[name], StaticCache)
    cache = new_static_cache(model, mask.shape[1] + _ROOM) if static else new_cache(model)
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
    return has_images or getattr(find_cache(model_kwargs), "_is_user_defined", False)


def holds_running_state(cache: Cache) -> bool:
    """Whether some layer holds a running state, which cannot be cropped."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)


def move_entries(cache: Cache, sources: np.ndarray, targets: np.ndarray) -> None:
    """Moves each row's entries from `sources` to `targets`, int64 `(R, n)`, in every layer."""
    rows: Any = torch.arange(len(sources))[:, None]
    source, target = torch.from_numpy(sources), torch.from_numpy(targets)
    for layer in cache.layers:
        device = layer.keys.device
        rows, source, target = (
            index.to(device, non_blocking=True) for index in (rows, source, target)
        )
        # The selection is a copy, so that it may overlap with where it goes.
        layer.keys[rows, :, target] = layer.keys[rows, :, source]  # (R, n, heads, head_dim)
        layer.values[rows, :, target] = layer.values[rows, :, source]


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
