"""How far a draft may reach: the positions at which plain decoding would be another computation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache, PreTrainedConfig

from ..text_config import context_length

_LENGTHS = re.compile(r"window|chunk|block|topk|local_att|keep_|budget|compress|mem_len")
_COUNTS = re.compile(r"layers|moe|router|expert")  # of something else: max_window_layers, moe_topk
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


def attention_windows(config: PreTrainedConfig) -> dict[str, int | None] | None:
    """How many of the last tokens each type of layer attends to.

    Returns:
        `dict` or `None`: By the type's name, the number, or `None` for all of them; the name is ""
        where the configuration has no types. `None` where some layer attends in another manner.
    """
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is not None:
        known = {"full_attention": None, "sliding_attention": window}
        windows = {kind: known[kind] for kind in types if kind in known}
        return windows if len(windows) == len({*types}) else None
    others = (name for name in LOCAL_ATTENTION if name != "sliding_window")
    if any(isinstance(getattr(config, name, None), int) for name in others):
        return None
    return {"": window}


def boundaries(config: PreTrainedConfig) -> list[int]:
    """The lengths, ascending, at which attention may become another computation: numbers that the
    configuration names like a window, a chunk or a selection of keys, and the windows of the cache.

    A false boundary costs one probe; a missed one can change ids.
    """
    named = [
        value
        for name, value in vars(config).items()
        if _LENGTHS.search(name) and not _COUNTS.search(name)
    ]
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


@dataclass(frozen=True)
class PositionLimits:
    """How far positions go in one model.

    Attributes:
        table (`int`, *optional*): The length of its table of position embeddings.
        unscaled (`int`, *optional*): The length at which its rotary frequencies change.
        dynamic (`bool`): Whether they change at every step from there on ("dynamic" scaling), or
            once ("longrope").
    """

    table: int | None
    unscaled: int | None
    dynamic: bool

    @classmethod
    def of(cls, config: PreTrainedConfig) -> PositionLimits:
        """Those that the configuration of a decoder names."""
        table, rope = context_length(config), length_dependent_rope(config)
        unscaled = None
        if rope:
            unscaled = (
                rope.get("original_max_position_embeddings")
                or getattr(config, "original_max_position_embeddings", None)
                or table
            )
        return cls(table, unscaled, rope.get("rope_type") == "dynamic")

    def furthest(self, last_position: int) -> int | None:
        """The last position that a draft may have behind a text whose last token has this one.

        Returns:
            `int` or `None`: Not past the end of the table, unless the text is past it already,
            which plain decoding will have to answer for. And not to where rotary frequencies
            change: one pass has one set of them, so that a draft which reaches there would change
            those of the tokens that are accepted.
        """
        limits = []
        if self.table is not None and last_position < self.table:
            limits.append(self.table - 1)
        if self.unscaled is not None and last_position <= self.unscaled:
            # The step at the border is plain: some models begin a new cache there (Phi-3).
            limits.append(max(self.unscaled - 1, last_position))
        elif self.dynamic:
            limits.append(last_position)
        return min(limits, default=None)


def length_dependent_rope(config: PreTrainedConfig) -> dict[str, Any]:
    """The parameters of a rotary embedding whose frequencies depend on the length of the text, or
    {}. A configuration may hold one set of them, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return next((each for each in sets if each.get("rope_type") in ("dynamic", "longrope")), {})
