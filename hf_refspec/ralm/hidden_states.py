"""The keys of a kNN-LM: the hidden states of a model that reads a corpus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..retrieval.vector_index import squared_lengths
from ..store.build.windows import read_windows
from ..text_config import text_config

Layer: TypeAlias = Literal["last_mlp", "last_hidden"]

_PROBE_LENGTH = 8


class HiddenStates:
    """What the last forward pass of a model had at a layer.

    Attributes:
        states (`torch.Tensor`): Of shape `(batch, length, hidden_size)`.
    """

    def __init__(self) -> None:
        self.states: torch.Tensor | None = None

    def last(self) -> torch.Tensor:
        """Of the first row's last token, of shape `(hidden_size,)`."""
        assert self.states is not None, "there was no forward pass"
        return self.states[0, -1]


@contextmanager
def recorded(model: PreTrainedModel, layer: Layer) -> Iterator[HiddenStates]:
    """Records a layer's hidden states in every forward pass of this thread meanwhile.

    Args:
        model (`PreTrainedModel`): A decoder.
        layer (`str`): `"last_mlp"`, what goes into the last feed-forward block, after the layer
            norm (Khandelwal et al. 2020, section 5, find it best); or `"last_hidden"`, what comes
            out of the decoder.

    Raises:
        ValueError: If the model does not have the layer, or there is none of this name.
    """
    seen, thread = HiddenStates(), get_ident()

    def before_mlp(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if get_ident() == thread:
            seen.states = args[0] if args else next(iter(kwargs.values()))

    def after_decoder(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if get_ident() == thread:
            seen.states = output[0]

    for hook in (before_mlp, after_decoder):
        vars(hook)["only_reads"] = True  # what is known of the model's logits stays true
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
    """The feed-forward block of the last decoder layer.

    Raises:
        ValueError: If none is found by its name.
    """
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
def read_corpus(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    corpus: str | Iterable[str],
    layer: Layer,
    max_entries: int | None,
    progress: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Runs a model over a corpus; arguments and errors as of [`KnnDatastore.build`].

    Returns:
        The keys, float32 of shape `(entries, dimension)`, and the tokens that followed them, int32
        of shape `(entries,)`.
    """
    keys, values, entries = [], [], 0
    with (
        recorded(model, layer) as hidden,
        tqdm(
            total=max_entries, unit=" tokens", unit_scale=True, disable=not progress or None
        ) as bar,
    ):
        for batch, ids in read_windows(model, tokenizer, corpus):
            model.base_model(ids, use_cache=False)
            assert hidden.states is not None
            states = hidden.states.float().numpy(force=True)
            for window, of_window in zip(batch, states, strict=True):
                keys.append(of_window[window.predicted].copy())
                values.append(window.targets.astype(np.int32))
                entries += len(values[-1])
                bar.update(len(values[-1]))
            if max_entries is not None and entries >= max_entries:
                break
    if entries == 0:
        raise ValueError("corpus has no text of two tokens or more: there is nothing to keep")
    return np.concatenate(keys)[:max_entries], np.concatenate(values)[:max_entries]


@dataclass(frozen=True)
class Predictions:
    """Some tokens of a text, in their order, and what a model knows before each.

    Attributes:
        targets (`np.ndarray`, int64 of shape `(n,)`): The tokens.
        log_probs (`np.ndarray`, float64 of shape `(n,)`): Of these, by the model.
        states (`np.ndarray`, float32 of shape `(n, dimension)`): The hidden states before them.
    """

    targets: np.ndarray
    log_probs: np.ndarray
    states: np.ndarray


@torch.no_grad()
def read_predictions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Iterable[str],
    layer: Layer,
) -> Iterator[Predictions]:
    """Runs a model over texts, in windows that overlap: every token once, but for the first of each
    text, which nothing comes before.

    Raises:
        TypeError: If a text is not a string.
        ValueError: If the model does not have the layer.
    """
    with recorded(model, layer) as hidden:
        for batch, ids in read_windows(model, tokenizer, text):
            logits = model(ids, use_cache=False).logits
            assert hidden.states is not None
            for row, window in enumerate(batch):
                log_probs = logits[row, window.predicted].float().log_softmax(dim=-1)
                places = torch.from_numpy(window.targets).to(log_probs.device)[:, None]
                yield Predictions(
                    window.targets,
                    log_probs.gather(1, places)[:, 0].double().numpy(force=True),
                    hidden.states[row, window.predicted].float().numpy(force=True),
                )


def checked_lengths(keys: np.ndarray) -> np.ndarray:
    """The squared length of each key, float32 of shape `(entries,)`.

    Raises:
        ValueError: If a key is not finite.
    """
    lengths = squared_lengths(keys)
    if not np.isfinite(lengths).all():
        raise ValueError(
            f"the model's hidden states are not finite as {keys.dtype}; "
            + ("is the model damaged?" if keys.dtype == np.float32 else 'try "float32"')
        )
    return lengths


@torch.no_grad()
def probe(model: PreTrainedModel, layer: Layer) -> np.ndarray:
    """A model's hidden state after a fixed text, float32 of shape `(dimension,)`: tells whose keys
    they are."""
    vocab_size = text_config(model).vocab_size
    ids = torch.arange(1, _PROBE_LENGTH + 1, device=model.device)[None] % vocab_size
    with recorded(model, layer) as hidden:
        model.base_model(ids, use_cache=False)
        return hidden.last().float().numpy(force=True)
