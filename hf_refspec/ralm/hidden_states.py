"""The hidden states of a model while it runs: the keys and the queries of a kNN-LM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..corpus.windows import read_windows
from ..text_config import text_config

Layer: TypeAlias = Literal["last_mlp", "last_hidden"]

_FIXED_LENGTH = 8  # tokens of the text that identifies a model


class HiddenStates:
    """A layer's states in the last forward pass."""

    states: torch.Tensor  # (batch, length, hidden_size)

    def last(self) -> np.ndarray:
        """The state of the first row's last token, float32 of shape `(hidden_size,)`."""
        return self.states[0, -1].float().numpy(force=True).copy()


@contextmanager
def recorded(model: PreTrainedModel, layer: Layer) -> Iterator[HiddenStates]:
    """Records a layer's hidden states in every forward pass of this thread inside the context.

    `"last_mlp"` is the input of the last feed-forward block, after the layer norm (Khandelwal et
    al. 2020, section 5, find it best), and `"last_hidden"` the decoder's output.
    """
    seen = HiddenStates()
    thread = get_ident()

    def before_mlp(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if get_ident() == thread:
            seen.states = args[0] if args else next(iter(kwargs.values()))

    def after_decoder(_: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if get_ident() == thread:
            seen.states = output[0]

    for hook in (before_mlp, after_decoder):
        vars(hook)["only_reads"] = True  # measurements of the model's logits stay valid
    if layer == "last_mlp":
        handle = last_mlp(model).register_forward_pre_hook(before_mlp, with_kwargs=True)
    elif layer == "last_hidden":
        handle = model.base_model.register_forward_hook(after_decoder)
    else:
        raise ValueError(f"layer must be one of {get_args(Layer)}, but is {layer!r}")
    try:
        yield seen
    finally:
        handle.remove()


def last_mlp(model: PreTrainedModel) -> nn.Module:
    """The feed-forward block of the last decoder layer."""
    count = text_config(model).num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            mlp = getattr(module[-1], "mlp", None)
            if isinstance(mlp, nn.Module):
                return mlp
    raise ValueError(
        f'layer="last_mlp": {type(model).__name__} has no decoder layers with an `mlp`; pass '
        'layer="last_hidden"'
    )


@torch.no_grad()
def model_fingerprint(model: PreTrainedModel, layer: Layer) -> np.ndarray:
    """A model's hidden state after a fixed text, float32 of shape `(dimension,)`. It identifies the
    model that keys were built with."""
    vocab_size = text_config(model).vocab_size
    ids = torch.arange(1, _FIXED_LENGTH + 1, device=model.device)[None] % vocab_size
    with recorded(model, layer) as hidden:
        model.base_model(ids, use_cache=False)
        return hidden.last()


@torch.no_grad()
def read_documents(
    documents: Iterable[Any],
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    layer: Layer,
    max_entries: int | None,
    progress: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """The keys of a corpus, float32 of shape `(entries, dimension)`, and the tokens that followed
    them, int32 of shape `(entries,)`; arguments and errors as of [`KnnDatastore.build`]."""
    keys = []
    values = []
    entries = 0
    bar = tqdm(total=max_entries, unit=" tokens", unit_scale=True, disable=not progress or None)
    with bar, recorded(model, layer) as hidden:
        for windows, ids in read_windows(model, tokenizer, documents):
            model.base_model(ids, use_cache=False)
            for row, window in enumerate(windows):
                keys.append(hidden.states[row, window.predicted].float().numpy(force=True).copy())
                values.append(window.targets.astype(np.int32))
                entries += len(window.targets)
                bar.update(len(window.targets))
            if max_entries is not None and entries >= max_entries:
                break
    if entries == 0:
        raise ValueError("documents has no text of two tokens or more: there is nothing to keep")
    return np.concatenate(keys)[:max_entries], np.concatenate(values)[:max_entries]
