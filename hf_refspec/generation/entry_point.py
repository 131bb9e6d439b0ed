"""The mark of a decoding loop of this package, by which the hook knows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Loop = TypeVar("_Loop", bound=Callable[..., Any])


def entry_point(*takes: str) -> Callable[[_Loop], _Loop]:
    """Marks a function for `generate(custom_generate=...)`.

    Args:
        takes (`str`): Arguments of `generate` that transformers drops on its way to a callable
            (5.23: `streamer`, `tokenizer`), so that the hook binds them.
    """

    def marked(loop: _Loop) -> _Loop:
        loop.hf_refspec_takes = takes  # type: ignore[attr-defined]
        return loop

    return marked


def taken_by(custom_generate: Any) -> tuple[str, ...] | None:
    """What a marked loop takes; `None` where `custom_generate` is something else."""
    return getattr(loop_of(custom_generate), "hf_refspec_takes", None)


def loop_of(custom_generate: Any) -> Any:
    """What is behind a `functools.partial`."""
    return getattr(custom_generate, "func", custom_generate)
