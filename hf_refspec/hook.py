"""`candidate_generator=` on transformers' `generate`.

[`install`], which `import hf_refspec` calls, wraps `GenerationMixin.generate` once, as soon as
transformers has it. A call without `candidate_generator` goes straight through. A call with it
takes the official entry point, `custom_generate=<callable>`: transformers prepares the call as
usual, then calls [`speculate`] or another decoding loop of this package.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from .attachment import Attachment, attachment_of
from .version import untested_transformers

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from transformers import PreTrainedModel
    from transformers.generation import CandidateGenerator

    from .drafting.contract import Drafter
    from .store.datastore import Datastore

logger = logging.getLogger("hf_refspec")

# The module that has `generate`. Its import takes seconds, which `import hf_refspec` must not.
_MODULE = "transformers.generation.utils"


class GenerateOptions(TypedDict, total=False):
    """The options that this package adds to `generate`, for type checkers."""

    candidate_generator: Drafter | Datastore | CandidateGenerator | Literal["auto"] | None
    max_draft_tokens: int | Literal["auto"]
    verification: Literal["auto", "tree", "chain", "reproducible"]


OPTIONS = tuple(GenerateOptions.__annotations__)
_PARAMETERS = """
        Parameters that hf_refspec adds:
            candidate_generator (`Drafter`, `Datastore`, `CandidateGenerator` or `"auto"`, *optional*):
                The drafter. `"auto"` copies from the text and recycles the model's own earlier logits.
                By default nothing is drafted.
            max_draft_tokens (`int` or `"auto"`, *optional*, defaults to `"auto"`):
                The most draft nodes of a forward pass, up to 1,024. `"auto"` verifies as many as pay.
            verification (`"auto"`, `"tree"`, `"chain"` or `"reproducible"`, *optional*, defaults to `"auto"`):
                How drafts are verified. `"auto"` takes trees where a probe finds them exact for this
                model, else chains. With `"reproducible"` no bit depends on the drafts.
"""  # noqa: E501

# The function that `install` put in place of `generate`; `None` before, and after `uninstall`.
_wrapper: Any = None


def install() -> None:
    """Makes every model's `generate` take the options of [`speculate`], such as `verification`.

    A second call changes nothing."""
    if is_installed():
        return
    if _MODULE in sys.modules:
        _wrap(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _WAITING)


def uninstall() -> None:
    """Restores transformers' own `generate`. A second call changes nothing.

    If another package has wrapped `generate` since, its wrapper stays, and the function that it
    wraps passes every call on unchanged."""
    global _wrapper
    if _WAITING in sys.meta_path:
        sys.meta_path.remove(_WAITING)
    if _wrapper is not None:
        mixin = sys.modules[_MODULE].GenerationMixin
        if mixin.generate is _wrapper:
            mixin.generate = _wrapper.__wrapped__
        del sys.modules[_MODULE].CandidateGenerator.__ror__
    _wrapper = None


def is_installed() -> bool:
    """True if `generate` takes `candidate_generator`, or will as soon as transformers has it."""
    return _wrapper is not None or _WAITING in sys.meta_path


class _Waiting(MetaPathFinder):
    """Wraps `generate` when its module is imported. wrapt could, but takes 50 ms to import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            exec_module = spec.loader.exec_module

            def exec_and_wrap(module: ModuleType) -> None:
                exec_module(module)
                if self in sys.meta_path:  # not uninstalled since
                    sys.meta_path.remove(self)
                    _wrap(module)

            # The loader itself stays, since `inspect` asks it for the source.
            spec.loader.exec_module = exec_and_wrap  # type: ignore[method-assign]
        return spec


_WAITING = _Waiting()


def _wrap(module: ModuleType) -> None:
    global _wrapper
    mixin = module.GenerationMixin
    _wrapper = mixin.generate = _speculative(mixin.generate)
    module.CandidateGenerator.__ror__ = _blended


def _blended(generator: CandidateGenerator, drafter: Any) -> Drafter:
    """`"auto" | generator`, as Python asks the right operand where the left one is a string."""
    from .drafting.blend import Blend

    return Blend([drafter, generator])


def _shown(signature: inspect.Signature) -> inspect.Signature:
    """The signature of `generate` with this package's options, for `help()` and IDEs."""
    *others, kwargs = signature.parameters.values()
    types: dict[str, Any] = GenerateOptions.__annotations__
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if name == "candidate_generator" else "auto",
            annotation=types[name].__forward_arg__,
        )
        for name in OPTIONS
    ]
    return signature.replace(parameters=[*others, *added, kwargs])


def _speculative(generate: Any) -> Any:
    signature = inspect.signature(generate)

    @functools.wraps(generate)
    def generate_speculatively(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if _wrapper is not generate_speculatively:
            return generate(self, *args, **kwargs)
        _check_configs(self, args, kwargs)
        attachment = None
        if "candidate_generator" not in kwargs and kwargs.get("custom_generate") is None:
            attachment = attachment_of(self)
        if attachment is None and not _is_ours(kwargs):
            return generate(self, *args, **_plain(kwargs))
        call = signature.bind(self, *args, **kwargs).arguments
        named = {name: value for name, value in call.items() if name not in ("self", "kwargs")}
        named |= call.get("kwargs", {})
        if (why := untested_transformers()) is not None:
            return _untested(generate, self, named, attachment, why)
        if attachment is not None:
            return _attached(generate, self, named, attachment)
        return generate(self, **_prepared(self, named))

    shown: Any = generate_speculatively
    shown.__signature__ = _shown(signature)
    shown.__doc__ = (generate.__doc__ or "") + _PARAMETERS
    return shown


def _is_ours(kwargs: dict[str, Any]) -> bool:
    """True if a call names a drafter or one of this package's decoding loops."""
    if kwargs.get("candidate_generator") is not None:
        return True
    custom_generate = kwargs.get("custom_generate")
    if custom_generate is None:
        # Calls with a drafter are compared with such a call without one.
        return kwargs.get("verification") == "reproducible"
    loop = _loop_of(custom_generate)
    module = getattr(loop, "__module__", None) or ""
    ours = module.partition(".")[0] == __package__
    if hasattr(loop, "draft") or (ours and not inspect.isroutine(loop)):
        raise TypeError(
            f"`custom_generate={custom_generate!r}` is not a decoding loop. Pass a drafter or a "
            "datastore as `candidate_generator`."
        )
    return ours


def _untested(
    generate: Any,
    model: PreTrainedModel,
    kwargs: dict[str, Any],
    attachment: Attachment | None,
    why: str,
) -> Any:
    """A call under an untested release of transformers, which decodes plainly.

    A loop that retrieves, and reproducible bits, are refused."""
    custom_generate = kwargs.get("custom_generate")
    retrieves = custom_generate is not None and _loop_of(custom_generate).__name__ != "speculate"
    if retrieves or kwargs.get("verification") == "reproducible":
        raise RuntimeError(f"{why}.")
    options = {**getattr(custom_generate, "keywords", {}), **kwargs}
    if attachment is not None:
        attachment.log_plain_call(why)
    elif (drafter := options.get("candidate_generator")) is not None:
        from .drafting.stats import DraftStats

        _log_once(why)
        if isinstance(getattr(drafter, "stats", None), DraftStats):
            drafter.stats = DraftStats(reason=why)
    plain = _without_options(kwargs)
    plain.pop("custom_generate", None)
    return generate(model, **plain)


@functools.cache
def _log_once(why: str) -> None:
    logger.warning("generate() decodes plainly, with the same text and no speed-up: %s.", why)


def _attached(
    generate: Any, model: PreTrainedModel, kwargs: dict[str, Any], attachment: Attachment
) -> Any:
    """A call that names no drafter, of a model that has one attached."""
    from .refusals import RefusedCallError

    try:
        with attachment.drafter(model) as drafter:
            options = {**attachment.options, **kwargs, "candidate_generator": drafter}
            output = generate(model, **_prepared(model, options))
            attachment.count(drafter.stats)
            return output
    except RefusedCallError as error:  # before anything was done
        attachment.log_plain_call(str(error))
    return generate(model, **_without_options(kwargs))


def _plain(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a plain call; only with a `None` drafter it may have options."""
    for option in OPTIONS if "candidate_generator" not in kwargs else ():
        if kwargs.get(option) is not None:
            raise ValueError(
                f"`{option}={kwargs[option]!r}` needs a drafter: pass `candidate_generator` as "
                'well, "auto" for example, or leave it out.'
            )
    return _without_options(kwargs)


def _without_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in OPTIONS}


def _check_configs(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses a drafter in a generation config, which is copied and saved: it would be ignored."""
    named = args[1] if len(args) > 1 else kwargs.get("generation_config")
    for name, config in (
        ("generation_config", named),
        ("model.generation_config", getattr(model, "generation_config", None)),
    ):
        for option in OPTIONS:
            if getattr(config, option, None) is not None:
                raise ValueError(
                    f"`{name}.{option}` is set, but a drafter and its options belong to a call: "
                    f"pass `generate(..., {option}=...)`, and delete the attribute."
                )


def _prepared(model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments with which `generate` calls a decoding loop of this package.

    Arguments that transformers does not pass on to a callable are bound to it here. Nothing is
    streamed before the arguments have been checked."""
    from .generation.speculate import speculate
    from .refusals import check_call, setting
    from .transformers_names import DROPPED_ARGUMENTS, reading_arguments

    custom_generate = kwargs.get("custom_generate")
    loop = speculate if custom_generate is None else _loop_of(custom_generate)
    # A string names a loop of the Hub.
    parameters = inspect.signature(loop).parameters if callable(loop) else {}
    drafts = "candidate_generator" in parameters
    if kwargs.get("candidate_generator") is not None and not drafts:
        raise ValueError(
            f"`custom_generate={custom_generate!r}` cannot be combined with `candidate_generator`: "
            "both replace the decoding loop. Leave one of them out."
        )
    caller = "candidate_generator" if drafts else loop.__name__
    reading = {}
    if loop is speculate:
        named = (setting(name, model, kwargs) for name in ("use_mtp", "speculation_type"))
        reading = reading_arguments(kwargs.get("assistant_model"), *named)
    if reading:  # beside the drafter, and not by transformers' own loop
        kwargs = {name: value for name, value in kwargs.items() if name not in reading}
        kwargs |= {"use_mtp": False} if "use_mtp" in reading else {}
    check_call(model, kwargs, caller)
    bound = {*DROPPED_ARGUMENTS, *OPTIONS} & parameters.keys()
    options = dict(getattr(custom_generate, "keywords", {}))
    options |= {name: kwargs[name] for name in bound if name in kwargs}
    prepared = _with_stop_strings(model, {**options, **kwargs})
    if _lacks_cache(model, prepared):
        prepared["use_cache"] = True
        if loop is speculate:
            options["adds_cache"] = True
    if reading:
        options["reading"] = reading
    if options.get("verification") == "reproducible":
        if custom_generate is None:
            options.setdefault("candidate_generator", None)
        if not _names_cache(prepared):  # whatever its model is configured with
            prepared["cache_implementation"] = "static"
    others = {name: value for name, value in prepared.items() if name not in options}
    if "tokenizer" in kwargs and "tokenizer" not in bound:
        others["tokenizer"] = kwargs["tokenizer"]
    return {**others, "custom_generate": functools.partial(loop, **options)}


def _loop_of(custom_generate: Any) -> Any:
    """The decoding loop, also in a `functools.partial`."""
    return getattr(custom_generate, "func", custom_generate)


def _names_cache(kwargs: dict[str, Any]) -> bool:
    """True if a call says which cache it uses."""
    from .transformers_names import CACHE_NAMES

    config = kwargs.get("generation_config")
    named = kwargs.get("cache_implementation", getattr(config, "cache_implementation", None))
    return any(value is not None for value in (named, *map(kwargs.get, CACHE_NAMES)))


def _with_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Turns `stop_strings` into a criterion here, since a callable gets no tokenizer."""
    from transformers import StoppingCriteriaList, StopStringCriteria

    from .refusals import setting
    from .text_config import text_tokenizer

    stop_strings = setting("stop_strings", model, kwargs)
    tokenizer = text_tokenizer(kwargs.get("tokenizer"))
    if stop_strings is None or tokenizer is None:
        return kwargs
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):  # takes precedence
        criteria.append(StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer))
    return {**kwargs, "stop_strings": None, "stopping_criteria": criteria}


def _lacks_cache(model: PreTrainedModel, kwargs: dict[str, Any]) -> bool:
    """True if a model (such as MPT) uses no cache by default and the call does not mention one."""
    from .refusals import setting

    config = kwargs.get("generation_config")
    asked = kwargs.get("use_cache", getattr(config, "use_cache", None))
    return (
        asked is None
        and not _names_cache(kwargs)
        and setting("cache_implementation", model, kwargs) is None
        and setting("use_cache", model, kwargs) is False
    )
