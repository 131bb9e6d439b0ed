"""A forward pass that can be ended from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode


class Interrupted(BaseException):
    """Ends a forward pass; no `except Exception` on the way may catch it."""


class Interruptible(TorchFunctionMode):
    """Asks before every operation of torch whether to end, and raises [`Interrupted`] if so. It
    concerns this thread alone, and registers nothing at the model."""

    def __init__(self, asked: Callable[[], bool]) -> None:
        super().__init__()
        self._asked = asked

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self._asked():
            raise Interrupted
        return func(*args, **(kwargs or {}))
