"""The hidden state by which a context is found again, and how it is read off a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

Layer: TypeAlias = Literal["last_mlp", "last_hidden"]


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
    """Records a layer's hidden states in every forward pass meanwhile.

    Args:
        model (`PreTrainedModel`): A decoder.
        layer (`str`): `"last_mlp"`, what goes into the last feed-forward block, after the layer
            norm (Khandelwal et al. 2020, section 5, find it best); or `"last_hidden"`, what comes
            out of the decoder.

    Raises:
        ValueError: If the model does not have the layer, or there is none of this name.
    """
    seen = HiddenStates()

    def before_mlp(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.states = args[0] if args else next(iter(kwargs.values()))

    def after_decoder(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen.states = output[0]

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
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            mlp = getattr(module[-1], "mlp", None)
            if isinstance(mlp, nn.Module):
                return mlp
    raise ValueError(
        f'layer="last_mlp": {type(model).__name__} has no decoder layers with an `mlp`; pass '
        'layer="last_hidden"'
    )
