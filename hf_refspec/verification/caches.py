"""The key-value cache of a target: its kind, earlier states of it, the passes it allows, arguments
of fresh ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from transformers import (
    Cache,
    DynamicCache,
    DynamicLayer,
    PreTrainedConfig,
    PreTrainedModel,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..text_config import attention_windows, length_dependent_rope, text_config
from ..transformers_names import (
    CACHE_NAMES,
    RunningStateLayer,
    SlidingLayer,
    attention_implementation,
    belongs_to_caller,
    cache_name,
    keeps_state_in_modules,
)

# Images, and which tokens attend to them.
_IMAGES = ("pixel_values", "cross_attention_states", "cross_attention_mask")
# Keys and values of each layer, `(rows, heads, length, head_dim)`.
KeysAndValues: TypeAlias = Sequence[tuple[torch.Tensor, ...]]
# The tokens for which a fresh static cache has room after its prompts.
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
    `generate` prepared for a `given` call. The prompts have the int64 `mask`
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


def has_padding(model_kwargs: Mapping[str, Any]) -> bool:
    """True if any prompt of a call is padded."""
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
    """True if every layer keeps one entry per position, `(rows, heads, length, head_dim)`, so that
    tokens can be moved and cropped."""
    return (
        all(type(layer) is DynamicLayer for layer in cache.layers)
        and len({layer.get_seq_length() for layer in cache.layers}) <= 1
    )


def crosses_images(config: PreTrainedConfig, model_kwargs: Mapping[str, Any]) -> bool:
    """True if some layers attend to images alone (Mllama, Idefics), in a call that has images or
    whose cache may have some."""
    names = ("cross_attention_layers", "cross_layer_interval")
    if not any(getattr(config, name, None) for name in names):
        return False
    has_images = any(model_kwargs.get(name) is not None for name in _IMAGES)
    return has_images or belongs_to_caller(find_cache(model_kwargs))


def holds_running_state(cache: Cache) -> bool:
    """True if any layer holds a running state, which cannot be cropped."""
    return any(isinstance(layer, RunningStateLayer) for layer in cache.layers)


def has_static_layers(cache: Cache) -> bool:
    """True if any layer has a fixed length, so that nothing can be cropped from its end."""
    return any(isinstance(layer, StaticLayer) for layer in cache.layers)


def crop_layers(cache: Cache, length: int) -> None:
    """Crops every layer that is longer than this length."""
    for layer in cache.layers:
        if (excess := layer.get_seq_length() - length) > 0:
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
    """Running states are held in dicts and lists."""
    if isinstance(value, dict):
        return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in value.items()}
    if isinstance(value, list):
        return [v.clone() if isinstance(v, torch.Tensor) else v for v in value]
    return value


# --- kinds of verifiers that may be tried with a model and a call's arguments


def keeps_text(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """True if the layers of the cache keep the text or a sliding window, and [`take_masks`] holds.

    The configuration is asked too: a model with chunked attention may be given a cache that keeps
    everything, and would still need another mask; and where rotary frequencies depend on the length
    of the text, some models count the nodes of a tree as that (Phi-3).
    """
    cache = find_cache(model_kwargs)
    return (
        cache is not None
        and take_masks(model, model_kwargs)
        and _fits_in_place(cache)
        and _fits_in_place(new_cache(model))
    )


def _fits_in_place(cache: Cache) -> bool:
    return (
        all(type(layer) in (DynamicLayer, SlidingLayer) for layer in cache.layers)
        and len({layer.get_seq_length() for layer in cache.layers}) <= 1
        and not cache.offloading
    )


def is_static(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """True if the cache is static, whole or not begun, and [`take_masks`] holds of the call."""
    cache = find_cache(model_kwargs)
    if not isinstance(cache, StaticCache) or not take_masks(model, model_kwargs):
        return False
    layers = {type(layer) for layer in cache.layers}
    if int(cache.get_seq_length()) > 0 or not layers <= {StaticLayer, StaticSlidingWindowLayer}:
        return layers == {StaticLayer}
    # A given cache whose layers all keep a window does not say how many tokens are to fit.
    window = getattr(text_config(model), "sliding_window", None)
    return not belongs_to_caller(cache) or not all(
        layer.is_sliding and layer.max_cache_len == window for layer in cache.layers
    )


def can_be_cropped(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """True if tokens can be cropped from the end of the cache."""
    cache = find_cache(model_kwargs)
    # A stateful model with another kind of cache keeps its state somewhere else.
    return (
        cache is not None
        and not has_static_layers(cache)
        and not holds_running_state(cache)
        and not keeps_state_in_modules(model)
    )


def may_hold_state(_model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """True if the cache may hold a state: a cache of the model's own kind does not say so."""
    cache = find_cache(model_kwargs)
    return cache is not None and not has_static_layers(cache)


def take_masks(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """True if passes of a model can be given masks and positions: it needs position ids, an
    attention kernel that takes masks, layers that attend to the text or a sliding window, rotary
    frequencies that do not depend on the length of the text, and no virtual tokens."""
    config = text_config(model)
    mask = model_kwargs.get("attention_mask")
    return (
        model_kwargs.get("position_ids") is not None
        and (mask is None or mask.ndim == 2)
        and attention_implementation(model) in ("sdpa", "eager")
        and not length_dependent_rope(config)
        and attention_windows(config) is not None
        and not adds_tokens(model)
    )


def attends_packed(model: PreTrainedModel) -> bool:
    """True if passes of a model may be packed: it attends by torch's attention, in transformers'
    own forward pass, which does not know rows by their number."""
    return attention_implementation(model) == "sdpa" and type(model).forward.__module__.startswith(
        "transformers."
    )


def adds_tokens(model: PreTrainedModel) -> bool:
    """True if PEFT puts virtual tokens before the text (prompt, prefix and P-tuning, CPT): it then
    prepares the arguments of a pass itself, and takes masks `(R, length)` alone."""
    owner = getattr(model.prepare_inputs_for_generation, "__self__", None)
    config = getattr(owner, "active_peft_config", None)
    return bool(getattr(config, "is_prompt_learning", False))
