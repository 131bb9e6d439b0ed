"""Kernels: plain loops over plain arrays, each compiled once by numba.

A kernel is compiled once its machine code is in this process, made by numba or read from its cache.
The cache is next to the kernel's file, and is made again when that file changes: after a
change in another file whose functions a kernel calls, remove the `__pycache__`. Kernels have no
type hints: their numba signatures state the types of their arguments, and name the tuples of arrays
that `kernel_type` has defined. Where `NUMBA_DISABLE_JIT` is set, Python runs them: right, and slow.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numba import config, njit, types
from numba.core import event

logger = logging.getLogger("hf_refspec")

_types: dict[str, Any] = dict(vars(types))  # that signatures may name
_kernels: list[Kernel] = []
_compile_lock = threading.Lock()


class Kernel:
    """A function that numba compiles for its signatures: in its first call, or ahead of time."""

    def __init__(
        self, function: Callable, signatures: tuple[str, ...], drafts: bool, interpreted: bool
    ):
        self.__doc__ = function.__doc__
        self.python = function
        self.drafts = drafts
        self.interpreted = interpreted
        self._signatures = signatures
        self._compiled: Any = None
        self._address: int | None = None
        _kernels.append(self)

    def __call__(self, *arguments: Any) -> Any:
        if self._compiled is None and not self.interpreted:
            self.compile()
        if self._compiled is None:
            with np.errstate(all="ignore"):  # compiled code warns of no overflow either
                return self.python(*arguments)
        return self._compiled(*arguments)

    def compile(self) -> None:
        """Compiles all kernels of the same file; warns if numba's cache lacked them."""
        if self._compiled is not None:
            return
        start = time.perf_counter()
        kernels = [
            kernel
            for kernel in all_kernels()
            if kernel.drafts == self.drafts and kernel.python.__module__ == self.python.__module__
        ]
        if compile_all(kernels):
            logger.warning(
                "Waited %.1f s for hf_refspec's kernels to compile%s",
                time.perf_counter() - start,
                "; hf_refspec.warmup() does it ahead of time." if self.drafts else ".",
            )

    @property
    def address(self) -> int | None:
        """Address of the compiled C function, `None` until compiled."""
        if self._compiled is None:
            return None
        if self._address is None:
            (result,) = self._compiled.overloads.values()
            name = result.fndesc.llvm_cfunc_wrapper_name
            self._address = result.library.get_pointer_to_function(name)
        return self._address

    @property
    def cache_path(self) -> Path:
        """The folder that numba's cache has for it. Raises a RuntimeError if none is writable."""
        return Path(njit(cache=True)(self.python).stats.cache_path)

    def _compile(self, cached_only: bool) -> bool:
        """Compiles it alone. Returns true if numba's cache lacked it."""
        if self._compiled is not None or jit_is_disabled():
            return False
        try:
            compiled = self._compiled_by(njit(cache=True, nogil=True)(self.python), cached_only)
        except (RuntimeError, OSError):  # no folder for the cache is writable
            compiled = self._compiled_by(njit(nogil=True)(self.python), cached_only)
        compiled.disable_compile()
        self._compiled = compiled
        return not compiled.stats.cache_hits

    def _compiled_by(self, dispatcher: Any, cached_only: bool) -> Any:
        refusal = event.install_listener("numba:compile", _Refusal(dispatcher))
        with refusal if cached_only else nullcontext():
            for signature in self._signatures:
                dispatcher.compile(eval(signature, _types))
        return dispatcher


class NotCachedError(Exception):
    """numba's cache does not have a kernel."""


class _Refusal(event.Listener):
    """Raises a `NotCachedError` where numba begins to compile a function."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def on_start(self, event: Any) -> None:
        if event.data["dispatcher"] is self._function:
            raise NotCachedError

    def on_end(self, event: Any) -> None:
        pass


def kernel(
    *signatures: str, drafts: bool = True, interpreted: bool = False
) -> Callable[[Callable], Kernel]:
    """Turns a function into a `Kernel`.

    Args:
        signatures: What numba compiles it for.
        drafts: True if drafters and verifiers need it.
        interpreted: True if Python runs it until it is compiled, which is quick enough for small
            trees.
    """
    return lambda function: Kernel(function, signatures, drafts, interpreted)


def kernel_type(name: str, kind: type, fields: str) -> None:
    """Defines a named tuple's type for signatures: its name there, and the types of its fields."""
    _types[name] = types.BaseTuple.from_types(eval(fields, _types), kind)


def jit_is_disabled() -> bool:
    """True if numba compiles nothing, as debuggers and measurements of coverage want it."""
    return bool(config.DISABLE_JIT)


def all_kernels() -> list[Kernel]:
    """The kernels of the modules that are imported by now."""
    return [*_kernels]


def compile_all(kernels: list[Kernel], cached_only: bool = False) -> int:
    """Compiles kernels; returns how many numba's cache lacked. If `cached_only`, raises a
    `NotCachedError` at the first of them instead."""
    with _compile_lock:
        return sum([kernel._compile(cached_only) for kernel in kernels])
