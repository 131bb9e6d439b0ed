"""Kernels: plain loops over plain arrays, each compiled once by numba.

They have no type hints: the types of their arguments are those of their numba signatures. numba
keeps what it has compiled beside the kernel's file, and compiles it again when that file changes.
After a change in another file whose functions a kernel calls, remove the `__pycache__`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from numba import njit

logger = logging.getLogger("hf_refspec")

# The files beside this one whose kernels draft.
_DRAFTING = (
    "calibration",
    "copy_tree",
    "crest_table",
    "draft_tree",
    "llma_match",
    "recycling",
    "recycling_tree",
    "rest_trie",
    "similar_prompts",
    "static_tree",
    "suffix_array",
    "token_buffer",
)
_kernels: list[Kernel] = []
_compile_lock = threading.Lock()


class Kernel:
    """A function that numba compiles for its signatures, at its first call or `compile_kernels`."""

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
        """Compiles the kernels of the same file, which will be needed as well."""
        start = time.perf_counter()
        needed = self.drafts, self.python.__module__
        if _compile([each for each in _kernels if (each.drafts, each.python.__module__) == needed]):
            logger.warning(
                "This call waited %.1f s for hf_refspec's kernels to compile%s",
                time.perf_counter() - start,
                "; hf_refspec.warmup() does it ahead of time." if self.drafts else ".",
            )

    def compile(self) -> bool:
        """Compiles it or loads it from numba's cache; says whether it had to be compiled."""
        if self._compiled is not None:
            return False
        try:
            compiled = self._compile(njit(cache=True, nogil=True)(self.python))
        except (RuntimeError, OSError):  # no folder for the cache can be written
            compiled = self._compile(njit(nogil=True)(self.python))
        compiled.disable_compile()
        self._compiled = compiled
        return not compiled.stats.cache_hits

    def _compile(self, function: Any) -> Any:
        for signature in self._signatures:
            function.compile(signature)
        return function


def kernel(*signatures: str, drafts: bool = True) -> Callable[[Callable], Kernel]:
    """Makes a function a `Kernel` with these numba signatures.

    Args:
        signatures (`str`): One for each combination of types.
        drafts (`bool`, *optional*, defaults to `True`): Whether it is needed to draft.
    """
    return lambda function: Kernel(function, signatures, drafts)


def compile_kernels() -> None:
    """Compiles all kernels that draft now (seconds, once: numba keeps them on disk), so that no
    call waits. Those of retrievers are compiled by their first search."""
    for name in _DRAFTING:
        import_module(f"{__package__}.{name}")
    _compile([each for each in _kernels if each.drafts])


def _compile(kernels: list[Kernel]) -> int:
    """Compiles kernels or loads them; returns how many had to be compiled."""
    with _compile_lock:
        return sum([each.compile() for each in kernels])
