"""`candidate_generator=` on transformers' `generate`.

[`install`], which `import hf_refspec` calls, wraps `GenerationMixin.generate` once. A call without
`candidate_generator` goes straight through. A call with it takes the official door,
`custom_generate=<callable>`, which does all the usual preparation and then hands over to
[`speculate`].
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from transformers import (
    GenerationMixin,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)

from .decoding import speculate
from .validation import check_model

OPTIONS = ("candidate_generator", "max_draft_tokens", "verification")


def install() -> None:
    """Makes every model's `generate` take `candidate_generator`, `max_draft_tokens` and
    `verification`, see [`speculate`]. A second call changes nothing."""
    if not is_installed():
        GenerationMixin.generate = _speculative(GenerationMixin.generate)


def uninstall() -> None:
    """Gives transformers its own `generate` back. A second call changes nothing."""
    if is_installed():
        GenerationMixin.generate = GenerationMixin.generate.__wrapped__


def is_installed() -> bool:
    """Whether `generate` takes `candidate_generator`."""
    return getattr(GenerationMixin.generate, "takes_candidate_generator", False)


def _speculative(generate: Any) -> Any:
    signature = inspect.signature(generate)

    @functools.wraps(generate)
    def generate_speculatively(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("candidate_generator") is not None
        if asked or kwargs.get("custom_generate") is speculate:
            call = signature.bind(self, *args, **kwargs).arguments
            named = {name: value for name, value in call.items() if name not in ("self", "kwargs")}
            return generate(self, **_speculative_kwargs(self, {**named, **call.get("kwargs", {})}))
        if "candidate_generator" in kwargs:  # None: a plain call, whatever the other options
            for option in OPTIONS:
                kwargs.pop(option, None)
        return generate(self, *args, **kwargs)

    generate_speculatively.takes_candidate_generator = True  # type: ignore[attr-defined]
    return generate_speculatively


def _speculative_kwargs(model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments with which `generate` comes to [`speculate`].

    The streamer is bound here because transformers drops it on its way to a callable (5.23), and so
    that nothing is streamed before the arguments have been checked.
    """
    check_model(model)
    if kwargs.get("assistant_model") is not None:
        raise ValueError(
            "`assistant_model` cannot be combined with `candidate_generator`: both draft. Leave "
            "one of them out."
        )
    if kwargs.get("custom_generate") not in (None, speculate):
        raise ValueError(
            f"`custom_generate={kwargs['custom_generate']!r}` cannot be combined with "
            "`candidate_generator`: both replace the decoding loop. Leave one of them out."
        )
    options = {name: kwargs[name] for name in (*OPTIONS, "streamer") if name in kwargs}
    others = {name: value for name, value in kwargs.items() if name not in options}
    return {
        **_with_stop_strings(model, others),
        "custom_generate": functools.partial(speculate, **options),
    }


def _with_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Turns `stop_strings` into the criterion that `generate` would make of it: transformers drops
    the tokenizer, which that takes, on its way to a callable (5.23)."""
    configs = (kwargs.get("generation_config"), model.generation_config)
    stop_strings = kwargs.get("stop_strings")
    for config in configs:
        if stop_strings is None and config is not None:
            stop_strings = config.stop_strings
    tokenizer = kwargs.get("tokenizer")
    if stop_strings is None or tokenizer is None:
        return kwargs
    criterion = StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer)
    criteria = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or []), criterion])
    return {**kwargs, "stop_strings": None, "stopping_criteria": criteria}
