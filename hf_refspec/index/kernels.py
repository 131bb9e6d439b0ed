"""Kernels: plain loops over plain arrays, each compiled once by numba.

They have no type hints: their numba signatures state the types of their arguments, and name the
tuples of arrays that `kernel_type` has defined. numba caches compiled code beside the kernel's file
and compiles it again when that file changes. After a change in another file whose functions a
kernel calls, remove the `__pycache__`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from numba import njit, types

logger = logging.getLogger("hf_refspec")

_types: dict[str, Any] = dict(vars(types))  # that signatures may name
_kernels: list[Kernel] = []
_compile_lock = threading.Lock()


class Kernel:
    """A function that numba compiles for its signatures, in its first call or `compile_kernels`."""

    def __init__(self, function: Callable, signatures: tuple[str, ...], drafts: bool):
        self.__doc__ = function.__doc__
        self.python = function
        self.drafts = drafts
        self._signatures = signatures
        self._compiled: Any = None
        _kernels.append(self)

    def __call__(self, *arguments: Any) -> Any:
        if self._compiled is None:
            self._compile_neighbours()
        return self._compiled(*arguments)

    def _compile_neighbours(self) -> None:
        """Compiles all kernels of the same file: they are needed together."""
        start = time.perf_counter()
        needed = self.drafts, self.python.__module__
        if _compile([each for each in _kernels if (each.drafts, each.python.__module__) == needed]):
            logger.warning(
                "This call waited %.1f s for hf_refspec's kernels to compile%s",
                time.perf_counter() - start,
                "; hf_refspec.warmup() does it ahead of time." if self.drafts else ".",
            )

    def compile(self) -> bool:
        """Compiles it or loads it from numba's cache; returns whether it had to be compiled."""
        if self._compiled is not None:
            return False
        try:
            compiled = self._compile(njit(cache=True, nogil=True)(self.python))
        except (RuntimeError, OSError):  # no folder for the cache is writable
            compiled = self._compile(njit(nogil=True)(self.python))
        compiled.disable_compile()
        self._compiled = compiled
        return not compiled.stats.cache_hits

    def _compile(self, function: Any) -> Any:
        for signature in self._signatures:
            function.compile(eval(signature, _types))
        return function


def kernel(*signatures: str, drafts: bool = True) -> Callable[[Callable], Kernel]:
    """Turns a function into a `Kernel`."""
    return lambda function: Kernel(function, signatures, drafts)


def kernel_type(name: str, kind: type, *fields: str) -> None:
    """Defines a named tuple's type for signatures: its name there, and the types of its fields."""
    fields_of = [eval(field, _types) for field in fields]
    _types[name] = types.BaseTuple.from_types(fields_of, kind)


def compile_kernels() -> None:
    """Compiles all kernels that draft (seconds, once: numba caches them), so that no call waits.
    Retrievers compile theirs in their first search."""
    for module in iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")
    _compile([each for each in _kernels if each.drafts])


def _compile(kernels: list[Kernel]) -> int:
    """Compiles kernels or loads them; returns how many had to be compiled."""
    with _compile_lock:
        return sum([each.compile() for each in kernels])
