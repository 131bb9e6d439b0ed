"""Reads the text decoder's part of a (possibly multimodal) configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:  # they load torch, for which commands about datastores need not wait
    from transformers import PreTrainedConfig, PreTrainedModel

# Fields of configurations that limit attention to some of the positions.
LOCAL_ATTENTION = (
    "sliding_window",
    "window_size",
    "attention_window_size",
    "attention_chunk_size",
    "index_topk",
)

# Names of numbers that limit attention, and names that count something else: max_window_layers,
# moe_topk.
_LENGTHS = re.compile(r"window|chunk|block|topk|local_att|keep_|budget|compress|mem_len")
_COUNTS = re.compile(r"layers|moe|router|expert")
# Every probe's text is longer than this.
_CROSSED = 8


def text_config(model: PreTrainedModel | PreTrainedConfig) -> Any:
    """The configuration of the decoder in a model or in a configuration."""
    from transformers import PreTrainedConfig

    config = model if isinstance(model, PreTrainedConfig) else model.config
    return config.get_text_config(decoder=True)


def vocab_size_of(model: PreTrainedModel) -> int:
    """The number of token ids that a model may emit: more than configured if its head is larger."""
    head = model.get_output_embeddings()
    return max(text_config(model).vocab_size, getattr(head, "out_features", 0))


def readable_ids(model: PreTrainedModel) -> int:
    """The number of token ids that a model can read; its head may be larger."""
    embedding = None
    with suppress(NotImplementedError):  # models of others need not name it
        embedding = model.get_input_embeddings()
    size = getattr(embedding, "num_embeddings", None)
    return vocab_size_of(model) if size is None else size


def special_ids(config: PreTrainedConfig) -> list[int]:
    """The token ids that a configuration names, of padding, images and the like."""
    return [
        value
        for holder in (config, text_config(config))
        for name, value in vars(holder).items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    ]


def context_length(model: PreTrainedModel | PreTrainedConfig) -> int | None:
    """The number of tokens that a model can read; `None` if its configuration sets no limit."""
    config = text_config(model)
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)


def attends_locally(config: PreTrainedConfig) -> bool:
    """True if some layer does not attend to all positions."""
    return any(isinstance(getattr(config, name, None), int) for name in LOCAL_ATTENTION)


def attention_windows(config: PreTrainedConfig) -> dict[str, int | None] | None:
    """The number of last tokens that each type of layer attends to.

    Returns:
        `dict` or `None`: The number of tokens by the name of the type, `None` for all tokens; the
        name is "" where the configuration has no types. `None` in place of the `dict` where some
        layer attends in another manner.
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
    """The lengths, ascending, at which attention may become another computation.

    They are numbers that the configuration names like a window, a chunk or a selection of keys, and
    the windows of the cache. A false boundary costs one probe; a missed one can change ids.
    """
    from transformers import DynamicCache

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


def length_dependent_rope(config: PreTrainedConfig) -> dict[str, Any]:
    """The parameters, if any, of a rotary embedding that depends on the length of the text."""
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    dependent = ("dynamic", "longrope")
    return next((rope for rope in sets if rope.get("rope_type") in dependent), {})


def text_tokenizer(tokenizer: Any) -> Any:
    """A multimodal processor's tokenizer. Anything else is returned unchanged."""
    if isinstance(tokenizer, PreTrainedTokenizerBase):  # which may wrap another library's
        return tokenizer
    return getattr(tokenizer, "tokenizer", tokenizer)
