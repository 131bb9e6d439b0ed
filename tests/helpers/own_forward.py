"""Models whose own class does more in a forward pass than transformers' does: what a hook would do
too, but hooks are code of others, with which calls decode plainly."""

import inspect
from collections.abc import Callable
from typing import Any

import torch


class own_forward:
    """Gives a model a class of its own, whose forward is `forward(usual, **kwargs)`, until `remove`
    or the end of a `with` block."""

    def __init__(self, model: Any, forward: Callable[..., Any]):
        usual = type(model)

        class OwnForward(usual):
            def forward(self, input_ids=None, **kwargs):
                return forward(super().forward, input_ids=input_ids, **kwargs)

        OwnForward.__name__ = usual.__name__
        OwnForward.forward.__signature__ = inspect.signature(usual.forward)
        self._model, self._usual = model, usual
        model.__class__ = OwnForward

    def remove(self):
        self._model.__class__ = self._usual

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.remove()


def ignore_mask(usual: Callable[..., Any], **kwargs: Any) -> Any:
    """A forward that lets all tokens of a tree see each other."""
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.ndim == 4:
        kwargs["attention_mask"] = torch.ones(mask.shape, dtype=mask.dtype)
    return usual(**kwargs)


def move_nothing(entries, done, paths):
    """In place of `InPlaceEntries.keep`, which moves the entries of accepted nodes."""
    return done.cached_after(paths)
