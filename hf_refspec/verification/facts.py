"""What has been found out about a model, kept at the model: it lives and goes with it.

Much of it (which verifier is exact, what a pass costs) holds for the model as it is now: a hook, an
adapter, training mode, a layer that was replaced or quantised make it another function. Such facts
are kept for each of its last states.
"""

from __future__ import annotations

import weakref
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ..text_config import text_config

_ATTRIBUTE = "_hf_refspec_facts"
# States whose facts are kept: adapters that are switched on and off need not be probed each time.
_MOST_STATES = 8
_SIMPLE = {bool, int, float, str}
_FUNCTIONS = {FunctionType, MethodType, partial}
_LISTS = {"merged_adapters", "_active_adapter"}  # of PEFT


class Facts(dict[Any, Any]):
    """A dictionary that copies and pickles of a model do not take along: they may be changed, and a
    saved model must load without this package."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Facts:
        return Facts()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()


def facts_about(model: nn.Module) -> Facts:
    """The facts about a model, whatever becomes of it; none at first. Keys name all that a fact
    depends on."""
    facts = vars(model).get(_ATTRIBUTE)
    if not isinstance(facts, Facts):
        facts = vars(model)[_ATTRIBUTE] = Facts()
    return facts


def facts_about_state(model: nn.Module) -> Facts:
    """The facts about a model as it is now; none in a state that it was not in before."""
    states: list[tuple[_State, Facts]] = facts_about(model).setdefault("states", [])
    now = _State(model)
    for each in states[:]:  # a copy: other threads may be here as well
        if each[0] == now:
            return each[1]
    facts = Facts()
    states.insert(0, (now, facts))
    del states[_MOST_STATES:]
    return facts


class _State:
    """All that can change a model's logits, except the values of its weights.

    Modules and parameters are compared by identity, and not kept alive.
    """

    def __init__(self, model: nn.Module) -> None:
        parts: list[Any] = []
        self._values: list[Any] = _settings(model)
        for module in model.modules():
            attributes = vars(module)
            parts.append(module)
            # Training mode, rates of dropout, active adapters.
            values = [*attributes.values()]  # a copy: other threads may add some
            self._values += [value for value in values if type(value) in _SIMPLE]
            # Methods replaced by accelerate, torch.compile or the user.
            parts += [value for value in values if type(value) in _FUNCTIONS]
            for name in _LISTS & attributes.keys():
                self._values += attributes[name]
            if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]:
                hooks = attributes["_forward_hooks"] | attributes["_forward_pre_hooks"]
                self._values += [n for n, hook in hooks.items() if not hasattr(hook, "only_reads")]
            for parameter in attributes["_parameters"].values():
                # Offloaded weights are new objects after every pass.
                if parameter is not None and not parameter.is_meta:
                    parts.append(parameter)
                    self._values.append(parameter.dtype)
        self._identities = [*map(id, parts)]
        self._references = [*map(weakref.ref, parts)]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _State)
            and self._identities == other._identities
            and self._values == other._values
            # Of what is gone something else may have the identity.
            and all(reference() is not None for reference in self._references)
        )


def _settings(model: nn.Module) -> list[Any]:
    """What the model's configuration says, and what torch itself is set to."""
    settings: list[Any] = [torch.get_float32_matmul_precision()]
    for device in ("cpu", "cuda"):
        settings += [torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)]
    config = getattr(model, "config", None)
    for each in () if config is None else (config, text_config(config)):
        attributes = vars(each).values()
        settings += [repr(value) for value in attributes if type(value) in (list, dict)]
        settings += [value for value in attributes if type(value) in _SIMPLE]
    return settings
