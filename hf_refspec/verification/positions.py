"""How far a draft may reach: the positions at which plain decoding would be another computation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from transformers import DynamicCache, PreTrainedConfig

_LENGTHS = re.compile(r"window|chunk|block|topk|local_att|keep_|budget|compress|mem_len")
# Every probe's text is longer than this.
_CROSSED = 8
# Names in a configuration of what limits attention to some of the positions.
LOCAL_ATTENTION = (
    "sliding_window",
    "window_size",
    "attention_window_size",
    "attention_chunk_size",
    "index_topk",
)


def attends_locally(config: PreTrainedConfig) -> bool:
    """Whether the configuration says that some layer attends to some of the positions only."""
    return any(isinstance(getattr(config, name, None), int) for name in LOCAL_ATTENTION)


def boundaries(config: PreTrainedConfig) -> list[int]:
    """The lengths, ascending, at which attention may become another computation: numbers that the
    configuration names like a window, a chunk or a selection of keys, and the windows of the cache.

    One that is none costs a probe; one that is missed may cost other ids.
    """
    named = [value for name, value in vars(config).items() if _LENGTHS.search(name)]
    windows = [
        getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers
    ]
    return sorted({value for value in _numbers([named, windows]) if value > _CROSSED})


def _numbers(values: Any) -> Iterator[int]:
    """All integers in nested lists and dictionaries."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from _numbers(value)
    elif isinstance(values, int) and not isinstance(values, bool):
        yield values


def depth_limit(
    config: PreTrainedConfig, last_position: int, length: int, max_length: int | None
) -> int:
    """How deep a draft may go: not past `max_length`, where one token is the target's own, nor to
    positions where plain decoding would be another computation.

    Args:
        config (`PreTrainedConfig`): The target model's, of its decoder.
        last_position (`int`): That of the last token of the text.
        length (`int`): The length of the text.
        max_length (`int`, *optional*): The most that it may have.
    """
    limits = [np.iinfo(np.int32).max]
    if max_length is not None:
        limits.append(max_length - length - 1)
    furthest = furthest_position(config, last_position)
    if furthest is not None:
        limits.append(furthest - last_position)
    return min(limits)


def furthest_position(config: PreTrainedConfig, last_position: int) -> int | None:
    """The last position that a draft may have.

    Args:
        config (`PreTrainedConfig`): The target model's, of its decoder.
        last_position (`int`): That of the last token of the text.

    Returns:
        `int` or `None`: Not past the end of a table of position embeddings, unless the text is past
        it already, which plain decoding will have to answer for. And not to where a rotary
        embedding changes its frequencies: one pass has one set of them, so that a draft which
        reaches there would change those of the tokens that are accepted. "longrope" changes them
        once; "dynamic" at every step from there on, where nothing can be drafted any more.
    """
    table = embedded_positions(config)
    limits = [] if table is None or last_position >= table else [table - 1]
    rope = length_dependent_rope(config)
    if rope:
        unscaled = (
            rope.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or table
        )
        if unscaled is not None and last_position <= unscaled:
            # The step at the border is plain: some models begin a new cache there (Phi-3).
            limits.append(max(unscaled - 1, last_position))
        elif rope["rope_type"] == "dynamic":
            limits.append(last_position)
    return min(limits, default=None)


def embedded_positions(config: PreTrainedConfig) -> int | None:
    """The length of the table of position embeddings, where the configuration names one."""
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)


def length_dependent_rope(config: PreTrainedConfig) -> dict[str, Any]:
    """The parameters of a rotary embedding whose frequencies depend on the length of the text, {}
    if there is none. A configuration may hold one set of them, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return next((each for each in sets if each.get("rope_type") in ("dynamic", "longrope")), {})
