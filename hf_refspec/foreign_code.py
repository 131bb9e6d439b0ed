"""Third-party code in a model's forward passes: hooks, replaced forwards, attention functions.

It may depend on the call, the pass or the length of the text, which no probe shows, or count its
calls. Code of transformers, accelerate, PEFT, TRL, kernels and torch does not, and the model's own
class is probed with the model.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache, partial
from inspect import getattr_static
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_modules
from transformers import PreTrainedModel, cache_utils

from .transformers_names import attention_functions, is_quantised

TRUSTED = {"accelerate", "kernels", "peft", "torch", "transformers", "trl"}
TRUSTED.add(__name__.partition(".")[0])
_OF_TORCH = ("linear", "scaled_dot_product_attention")


def foreign_code(model: PreTrainedModel) -> str | None:
    """Names the first third-party code that runs in a model's forward passes, and its place."""
    for place, code in _pieces(model):
        for part in parts_of(code):
            package = package_of(part)
            if package not in TRUSTED and not hasattr(part, "only_reads"):
                name = getattr(part, "__qualname__", type(part).__qualname__)
                return f"{place} `{name}` of {package or 'unknown origin'}"
    return None


def _pieces(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """All code that could be a third party's, each with a description of its place."""
    for code in torch_modules._global_forward_pre_hooks.values():
        yield "torch has the global forward pre-hook", code
    for code in torch_modules._global_forward_hooks.values():
        yield "torch has the global forward hook", code
    for name in _OF_TORCH:
        yield f"torch has in the place of its `{name}` the function", getattr(nn.functional, name)
    for kind in vars(cache_utils).values():  # a pass keeps entries without calling their methods
        if isinstance(kind, type) and kind.__module__ == cache_utils.__name__:
            for name, code in vars(kind).items():
                if isinstance(code, FunctionType):
                    yield f"`{kind.__name__}` has in the place of its `{name}` the function", code
    own_package = package_of(type(model))
    known = TRUSTED | {own_package}
    kinds = dict.fromkeys(map(type, model.modules()))
    modules = dict.fromkeys(kind.__module__ for kind in kinds if package_of(kind) in known)
    sources = [sys.modules[name] for name in modules if name in sys.modules]
    imported = {id(value) for source in sources for value in vars(source).values()}
    for kind in kinds:
        yield f"`{kind.__name__}` is called by", getattr_static(kind, "__call__")
    for source in sources:
        for name, code in _replaced_functions(source):
            yield f"`{source.__name__}` has in the place of its `{name}` the function", code
    quantised = is_quantised(model)  # by a library, which replaces layers
    for name, module in model.named_modules():
        of_module = f"`{name}`" if name else "the model"
        if isinstance(module, PreTrainedModel):
            for code in attention_functions(module):
                yield f"{of_module} attends by the function", code
        attributes = vars(module)
        for code in attributes["_forward_pre_hooks"].values():
            yield f"{of_module} has the forward pre-hook", code
        for code in attributes["_forward_hooks"].values():
            yield f"{of_module} has the forward hook", code
        kind = type(module)
        if not (quantised or package_of(kind) in known or id(kind) in imported):
            yield f"{of_module} has been replaced by the module", kind
        forward = getattr_static(kind, "forward", None)
        owner = next((base for base in kind.__mro__ if "forward" in vars(base)), kind)
        own = {own_package, package_of(owner)}
        replaced = [attributes.get("forward"), attributes.get("_old_forward"), forward]
        for code in replaced:
            others = [part for part in parts_of(code) if package_of(part) not in own]
            yield from ((f"{of_module} has the replaced forward", part) for part in others)
        # accelerate's forward runs the hooks that it was given.
        hook = attributes.get("_hf_hook")
        for code in () if hook is None else getattr(hook, "hooks", [hook]):
            yield f"{of_module} has accelerate's hook", code


def _replaced_functions(source: ModuleType) -> Iterator[tuple[str, Any]]:
    """Third-party code, by name, that has replaced the functions that a module defines."""
    own = {*TRUSTED, source.__name__.partition(".")[0], *sys.stdlib_module_names}
    for name in _defined_functions(source):
        value = vars(source).get(name)
        if any(package_of(part) not in own for part in parts_of(value)):
            yield name, value


@cache
def _defined_functions(source: ModuleType) -> set[str]:
    """The names of the functions that a module's own code defines, if its source is at hand."""
    try:
        # Not by `ast`, which fails where two threads build trees at once (Python 3.11).
        return {*re.findall(r"^def (\w+)", inspect.getsource(source), re.MULTILINE)}
    except (OSError, TypeError):  # a notebook
        return set()


def parts_of(code: Any) -> Iterator[Any]:
    """The functions that code consists of: what decorators wrap runs too."""
    if isinstance(code, partial):
        yield from parts_of(code.func)
    elif isinstance(code, MethodType):
        yield from parts_of(code.__func__)
    elif code is not None:
        yield code
        yield from parts_of(getattr(code, "__wrapped__", None))


def package_of(part: Any) -> str:
    """The package that a function, a class or an object's class was written in.

    Wrappers copy `__module__`, but not their globals."""
    if isinstance(part, FunctionType):
        name = part.__globals__.get("__name__")
    else:
        name = getattr(part, "__module__", None) or type(part).__module__
    return str(name).partition(".")[0]
