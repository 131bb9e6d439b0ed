"""Findings about a model, kept for as long as it lives. For other processes see `finding.py`.

Most of them (which verifier is exact, the cost of a pass) hold for the model in its present state:
a hook, an adapter, training mode, a layer that was replaced or quantised make it another function.
Such findings are kept for each of its last states.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from inspect import getattr_static
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.backends import cuda
from torch.nn.modules import module as torch_modules
from transformers import PreTrainedConfig, PreTrainedModel

from ..kernels.pass_kernels import active_modes
from ..text_config import length_dependent_rope, text_config
from ..transformers_names import HAS_CAPTURING_HOOKS, keeps_state_in_modules
from .finding import Finding, add_finding, findings_path, read_findings, weight_summary

# Not an attribute of the model: no copy, pickle or fingerprint of it should hold the findings.
_FINDINGS: MutableMapping[nn.Module, dict[Any, Any]] = weakref.WeakKeyDictionary()
_MOVING = "attributes that forward passes change"
_FILE = "file of findings"
# The states that have findings: adapters that are switched on and off are not probed each time.
_MOST_STATES = 8
_SIMPLE = {bool, int, float, str}
_FUNCTIONS = {FunctionType, MethodType, partial}
_OF_PEFT = {"merged_adapters", "_active_adapter", "scaling"}  # attributes that list or name values
# Hooks of transformers and PEFT for gradients, which `generate` computes none of (training that
# switches gradient checkpointing around each call adds one each time), and for hidden states.
_HARMLESS = {"make_inputs_require_grads", "make_inputs_require_grad", "output_capturing_hook"}


def memo_of(model: nn.Module) -> dict[Any, Any]:
    """The findings about a model in any state; none at first. Keys name all that a finding
    depends on; no value may refer to the model, which would then never be freed."""
    return _FINDINGS.setdefault(model, {})


def memo_of_state(model: nn.Module) -> dict[Any, Any]:
    """The findings about a model in its present state; in a new one, those that a file has kept."""
    states: list[tuple[_State, dict[Any, Any]]] = memo_of(model).setdefault("states", [])
    now = _State(model)
    for state, memo in states[:]:  # a copy: other threads may be here as well
        if state == now:
            return memo
    path = findings_path(model, now.values)
    new: dict[Any, Any] = {**read_findings(path), _FILE: path}
    states.insert(0, (now, new))
    del states[_MOST_STATES:]
    return new


def keep_for_later(model: nn.Module, memo: dict[Any, Any], about: str, finding: Finding) -> None:
    """Keeps a finding for later processes, unless the model has changed since its `memo` began."""
    path = memo[_FILE]
    if path is not None and path == findings_path(model, _State(model).values):
        add_finding(path, about, finding)


class Watch:
    """Notices that an attribute, a weight, a child or a scale of PEFT at a module is set, a weight
    is written or a hook comes or goes. It is cheap enough to be asked after each token, unlike a
    [`_State`]."""

    def __init__(self, model: nn.Module) -> None:
        modules = [*model.modules()]
        self._dicts = [vars(module) for module in modules]
        for module in modules:
            held = module._parameters, module._modules, vars(module).get("scaling")
            self._dicts += [each for each in held if each and isinstance(each, dict)]
        self._hooks = [
            *(torch_modules._global_forward_pre_hooks, torch_modules._global_forward_hooks),
            *(module._forward_pre_hooks for module in modules),
            *(module._forward_hooks for module in modules),
        ]
        self._weights = [weight for weight in model.parameters() if not weight.is_inference()]
        self.mark()

    def mark(self) -> None:
        """Compares with the present from now on."""
        self._before = self._now()

    def is_unchanged(self) -> bool:
        """True if the model is as it was at the last mark."""
        try:
            return self._now() == self._before
        except (RuntimeError, ValueError):  # of two tensors, or two arrays
            return False

    def _now(self) -> tuple[Any, ...]:
        written = [(weight.data_ptr(), weight._version) for weight in self._weights]
        hooks = [[*held] for held in self._hooks if held]
        return hooks, written, [[*each.values()] for each in self._dicts]


def state_of(model: PreTrainedModel) -> tuple[Any, ...]:
    """A state that keys and values depend on: the weights, and whatever else changes logits."""
    weights = [*model.named_parameters(), *model.named_buffers()]
    versions = [
        (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        for _, weight in weights
    ]
    # What is written through `data`, as by libraries for training, has no version.
    summaries = map(weight_summary, weights)
    return memo_of_state(model).setdefault("identity", object()), versions, [*summaries]


@contextmanager
def probing(model: PreTrainedModel) -> Iterator[None]:
    """Around forward passes of a probe. Restores what modules hold of the last text, with which
    plain decoding continues: rotary frequencies of the longest text, a running state
    (RecurrentGemma). Numbers and strings at modules that change meanwhile count the passes or
    describe the last one, and are no settings."""
    stateful = keeps_state_in_modules(model)
    scaled = length_dependent_rope(text_config(model))
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    held = [
        (module, attributes, buffers)
        for module, attributes, buffers in before
        if stateful or (scaled and any("inv_freq" in name for name in buffers))
    ]
    tensors = [
        (value, value.clone())
        for _, *kinds in held
        for values in kinds
        for value in values.values()
        if isinstance(value, torch.Tensor)
    ]
    try:
        yield
    finally:
        moving = memo_of(model).setdefault(_MOVING, weakref.WeakKeyDictionary())
        for module, old, _ in before:
            # Not training mode, a bool, which another thread may have switched meanwhile.
            changed = {
                name
                for name, value in [*vars(module).items()]
                if type(value) in (int, float, str) and old.get(name) != value
            }
            if changed:
                moving[module] = moving.get(module, set()) | changed
        for module, attributes, buffers in held:
            vars(module).update(attributes)
            module._buffers.update(buffers)
        for tensor, value in tensors:
            tensor.copy_(value)


class _State:
    """All that can change a model's logits, except the values of its weights.

    Modules, functions and parameters are compared by identity, and not kept alive.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [*model.modules()]
        moving = memo_of(model).get(_MOVING, {})
        # Kernels of other packages replace methods of classes.
        kinds = dict.fromkeys(map(type, modules))
        forwards = [getattr_static(kind, "forward", None) for kind in kinds]
        parts: list[Any] = modules + [
            forward for forward in forwards if type(forward) is FunctionType
        ]
        self.values: list[Any] = _settings(model)
        for module in modules:
            attributes = dict(vars(module))
            left_out = {HAS_CAPTURING_HOOKS, *moving.get(module, ())}
            for name, value in attributes.items():
                if type(value) in _SIMPLE and name not in left_out:
                    self.values.append(value)  # training mode, rates of dropout, active adapters
                elif type(value) in _FUNCTIONS:
                    parts += _parts_of(value)  # replaced by accelerate, torch.compile or the user
                elif name in _OF_PEFT and type(value) in (list, dict):
                    self.values += value.items() if type(value) is dict else value
            hooks = {**attributes["_forward_pre_hooks"], **attributes["_forward_hooks"]}
            for number, hook in hooks.items():
                reads = hasattr(hook, "only_reads")
                if not reads and getattr(hook, "__name__", None) not in _HARMLESS:
                    is_function = type(hook) in _FUNCTIONS
                    parts += _parts_of(hook) if is_function else []
                    self.values += [] if is_function else [number]
            for parameter in attributes["_parameters"].values():
                # Offloaded weights are new objects after every pass.
                if parameter is not None and not parameter.is_meta:
                    parts.append(parameter)
                    self.values.append(parameter.dtype)
        self._identities = [*map(id, parts)]
        self._references = [*map(weakref.ref, parts)]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _State)
            and self._identities == other._identities
            and self.values == other.values
            # The id of a deleted object can be reused.
            and all(reference() is not None for reference in self._references)
        )


def _parts_of(function: Any) -> list[Any]:
    """The objects that identify a function: a bound method is a new object at each access."""
    parts = [function.__func__, function.__self__] if type(function) is MethodType else [function]
    return parts if all(type(part).__weakrefoffset__ for part in parts) else [function]


def _settings(model: nn.Module) -> list[Any]:
    """The values of the model's configuration, and the settings of torch itself."""
    try:
        precisions: list[str | None] = [torch.get_float32_matmul_precision()]
    except RuntimeError:  # it was set for each library
        libraries = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
        precisions = [getattr(library, "fp32_precision", None) for library in libraries]
    settings: list[Any] = [torch.get_num_threads(), *precisions, *active_modes()]
    settings += [torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled]
    settings += [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()]
    settings += [cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()]
    settings += [*torch_modules._global_forward_pre_hooks, *torch_modules._global_forward_hooks]
    for device in ("cpu", "cuda"):
        settings += [torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)]
    configs: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig):
            configs |= {id(part): part for part in (config, text_config(config))}
    for config in configs.values():
        attributes = vars(config).values()
        settings += [repr(value) for value in attributes if type(value) in (list, dict)]
        settings += [value for value in attributes if type(value) in _SIMPLE]
    return settings
