"""Copies of logits processors, for rows that need one each."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

from transformers import SynthIDTextWatermarkLogitsProcessor

from .validation import RefusedCallError

# Objects of xgrammar and llguidance that are not Python's, which `copy.deepcopy` cannot copy:
# what they compile never changes, and what reads a text has a method of its own.
_COPIED: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("xgrammar.compiler", "CompiledGrammar"): lambda shared: shared,
    ("xgrammar.matcher", "GrammarMatcher"): lambda matcher: matcher.fork(),
    ("builtins", "LLTokenizer"): lambda shared: shared,
    ("builtins", "LLMatcher"): lambda matcher: matcher.deep_copy(),
}


def copied_processor(asked: Any) -> Any:
    """The logits processor itself if it keeps no state, else a copy.

    Raises:
        ValueError: If it cannot be copied.
    """
    stateless = type(asked).__module__.startswith("transformers.generation.")
    if stateless and not isinstance(asked, SynthIDTextWatermarkLogitsProcessor):
        return asked
    # Modules, which cannot be copied, are shared; those of outlines hold torch.
    known = {id(module): module for module in list(sys.modules.values())}
    try:
        for held in getattr(asked, "__dict__", {}).values():
            for part in held if isinstance(held, list) else [held]:
                if copied := _COPIED.get((type(part).__module__, type(part).__name__)):
                    known[id(part)] = copied(part)
        return copy.deepcopy(asked, known)
    except Exception as error:  # whatever its state raises at being copied
        raise RefusedCallError(
            f"`logits_processor` has a {type(asked).__name__} that cannot be copied ({error!r}), "
            "and with `candidate_generator` each row needs its own. Let it be copied by "
            "`copy.deepcopy`, or pass one prompt at a time."
        ) from error
