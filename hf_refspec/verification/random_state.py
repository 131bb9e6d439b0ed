"""The random numbers that a pass may draw."""

from __future__ import annotations

from typing import Any

import torch


def random_numbers(device: torch.device) -> Any:
    """The module that draws from a device's default generator."""
    return torch.random if device.type == "cpu" else torch.get_device_module(device)


def random_state(device: torch.device) -> list[torch.Tensor]:
    """The states of the generators that a pass may draw from, the host's first."""
    devices = [torch.device("cpu")] if device.type == "cpu" else [torch.device("cpu"), device]
    return [random_numbers(source).get_rng_state() for source in devices]


def set_random_state(device: torch.device, state: list[torch.Tensor]) -> None:
    """Sets the generators back to what [`random_state`] returned."""
    for source, source_state in zip((torch.device("cpu"), device), state, strict=False):
        random_numbers(source).set_rng_state(source_state)
