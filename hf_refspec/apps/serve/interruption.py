"""Ends a forward pass that nobody waits for any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode


class Interruptible(TorchFunctionMode):
    """Within it, every operation of torch asks first whether there is still a reason for it. That
    concerns this thread alone, and nothing is registered at the model.

    Args:
        check (callable): Raises what ends it.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self._check = check

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._check()
        return func(*args, **(kwargs or {}))
