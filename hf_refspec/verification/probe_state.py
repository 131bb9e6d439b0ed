"""The state that a probe restores: random numbers, and tensors that a model's modules hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from ..text_config import length_dependent_rope, text_config
from ..transformers_names import keeps_state_in_modules


def random_numbers(device: torch.device) -> Any:
    """The module that draws from a device's default generator."""
    return torch.random if device.type == "cpu" else torch.get_device_module(device)


def random_state(device: torch.device) -> list[torch.Tensor]:
    """The states of the generators that a pass may draw from, the host's first."""
    devices = [torch.device("cpu")] if device.type == "cpu" else [torch.device("cpu"), device]
    return [random_numbers(each).get_rng_state() for each in devices]


def set_random_state(device: torch.device, state: list[torch.Tensor]) -> None:
    """Sets the generators back to what [`random_state`] returned."""
    for each, of_device in zip((torch.device("cpu"), device), state, strict=False):
        random_numbers(each).set_rng_state(of_device)


@contextmanager
def modules_restored(model: PreTrainedModel) -> Iterator[None]:
    """Restores what the modules of a model hold of the last text, with which plain decoding goes
    on: rotary frequencies of the longest text, a running state (RecurrentGemma)."""
    length_dependent = length_dependent_rope(text_config(model))
    held = [
        (module, dict(vars(module)), dict(module._buffers))
        for module in model.modules()
        if keeps_state_in_modules(model)
        or (length_dependent and any("inv_freq" in name for name in module._buffers))
    ]
    tensors = [
        (each, each.clone())
        for _, *kinds in held
        for values in kinds
        for each in values.values()
        if isinstance(each, torch.Tensor)
    ]
    try:
        yield
    finally:
        for module, attributes, buffers in held:
            vars(module).update(attributes)
            module._buffers.update(buffers)
        for tensor, value in tensors:
            tensor.copy_(value)
