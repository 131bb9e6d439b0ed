"""How a drafter is printed."""

from __future__ import annotations

import inspect
from typing import ClassVar


class Printed:
    """Prints the arguments of its class that differ from their defaults, but no large ones."""

    _shown: ClassVar[tuple[type, ...]] = (bool, int, float, str)  # types of arguments, by repr()

    def __repr__(self) -> str:
        arguments = inspect.signature(type(self).__init__).parameters.values()
        given = [
            f"{each.name}={getattr(self, each.name)!r}"
            for each in arguments
            if isinstance(getattr(self, each.name, None), self._shown)
            and getattr(self, each.name) != each.default
        ]
        return f"{type(self).__name__}({', '.join(given)})"
