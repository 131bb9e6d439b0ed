"""`candidate_generator=` on transformers' `generate`.

[`install`], which `import hf_refspec` calls, wraps `GenerationMixin.generate` once. A call without
`candidate_generator` goes straight through. A call with it takes the official door,
`custom_generate=<callable>`, which does all the usual preparation and then hands over to
[`speculate`].
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from transformers import (
    GenerationMixin,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)

from .generation.loop import speculate
from .generation.validation import check_call, check_model, setting
from .ralm.iterative import iterative_ralm
from .ralm.knn_lm import knn_lm
from .ralm.refusals import refusals_of

OPTIONS = ("candidate_generator", "max_draft_tokens", "verification")

# Other decoding loops that transformers should not drop the streamer and the tokenizer on the way
# to.
RETRIEVING = (iterative_ralm, knn_lm)

# What `install` put in place of `generate`; `None` before, and after `uninstall`.
_wrapper: Any = None


def install() -> None:
    """Makes every model's `generate` take `candidate_generator`, `max_draft_tokens` and
    `verification`, see [`speculate`]. A second call changes nothing."""
    global _wrapper
    if not is_installed():
        _wrapper = GenerationMixin.generate = _speculative(GenerationMixin.generate)


def uninstall() -> None:
    """Gives transformers its own `generate` back. A second call changes nothing.

    Where another package has wrapped `generate` since, its wrapper stays, and what it wraps passes
    every call on as it is.
    """
    global _wrapper
    if GenerationMixin.generate is _wrapper:
        GenerationMixin.generate = _wrapper.__wrapped__
    _wrapper = None


def is_installed() -> bool:
    """Whether `generate` takes `candidate_generator`."""
    return _wrapper is not None


def _speculative(generate: Any) -> Any:
    signature = inspect.signature(generate)

    @functools.wraps(generate)
    def generate_speculatively(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if _wrapper is not generate_speculatively:
            return generate(self, *args, **kwargs)
        prepare = _preparation(kwargs)
        if prepare is not None:
            call = signature.bind(self, *args, **kwargs).arguments
            named = {name: value for name, value in call.items() if name not in ("self", "kwargs")}
            return generate(self, **prepare(self, {**named, **call.get("kwargs", {})}))
        if "candidate_generator" in kwargs:  # None: a plain call, whatever the other options
            for option in OPTIONS:
                kwargs.pop(option, None)
        return generate(self, *args, **kwargs)

    return generate_speculatively


def _preparation(kwargs: dict[str, Any]) -> Callable[..., dict[str, Any]] | None:
    """What makes the keyword arguments for a decoding loop of this package; `None` for others."""
    door = kwargs.get("custom_generate")
    if kwargs.get("candidate_generator") is not None or _is_door(door):
        return _speculative_kwargs
    return _retrieving_kwargs if _function(door) in RETRIEVING else None


def _is_door(custom_generate: Any) -> bool:
    """Whether it is [`speculate`], or a `functools.partial` of it."""
    return _function(custom_generate) is speculate


def _function(custom_generate: Any) -> Any:
    """What is behind a `functools.partial`."""
    return getattr(custom_generate, "func", custom_generate)


def _speculative_kwargs(model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments with which `generate` comes to [`speculate`].

    The streamer is bound here because transformers drops it on its way to a callable (5.23), and so
    that nothing is streamed before the arguments have been checked.
    """
    check_model(model)
    check_call(model, kwargs)
    door = kwargs.get("custom_generate")
    if door is not None and not _is_door(door):
        raise ValueError(
            f"`custom_generate={door!r}` cannot be combined with `candidate_generator`: both "
            "replace the decoding loop. Leave one of them out."
        )
    options = dict(getattr(door, "keywords", {}))
    options |= {name: kwargs[name] for name in (*OPTIONS, "streamer") if name in kwargs}
    others = {name: value for name, value in kwargs.items() if name not in options}
    return {
        **_with_stop_strings(model, others),
        "custom_generate": functools.partial(speculate, **options),
    }


def _retrieving_kwargs(model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments with which `generate` comes to a loop that retrieves: with the streamer
    and the tokenizer bound, see [`_speculative_kwargs`]."""
    door = kwargs["custom_generate"]
    loop = _function(door)
    with refusals_of(loop.__name__):
        check_model(model)
        check_call(model, kwargs)
    options = dict(getattr(door, "keywords", {}))
    options |= {name: kwargs[name] for name in ("streamer", "tokenizer") if name in kwargs}
    prepared = _with_stop_strings(model, {**options, **kwargs})
    others = {name: value for name, value in prepared.items() if name not in options}
    return {**others, "custom_generate": functools.partial(loop, **options)}


def _with_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Turns `stop_strings` into the criterion that `generate` would make of it: transformers drops
    the tokenizer, which that takes, on its way to a callable (5.23)."""
    stop_strings = setting("stop_strings", model, kwargs)
    tokenizer = kwargs.get("tokenizer")
    if stop_strings is None or tokenizer is None:
        return kwargs
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):  # takes precedence
        criteria.append(StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer))
    return {**kwargs, "stop_strings": None, "stopping_criteria": criteria}
