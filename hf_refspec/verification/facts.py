"""What has been found out about a model, kept at the model: it lives and goes with it."""

from __future__ import annotations

from typing import Any

from torch import nn

_ATTRIBUTE = "_hf_refspec_facts"


class Facts(dict[Any, Any]):
    """A dictionary that copies and pickles of a model do not take along: they may be changed, and a
    saved model must load without this package."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Facts:
        return Facts()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()


def facts_about(model: nn.Module) -> Facts:
    """The facts about a model; none at first. Keys name all that a fact depends on."""
    facts = vars(model).get(_ATTRIBUTE)
    if not isinstance(facts, Facts):
        facts = vars(model)[_ATTRIBUTE] = Facts()
    return facts
