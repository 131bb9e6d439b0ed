"""The hidden states of a prompt, from the prefill that `generate` runs anyway.

A hook on the model would be run into by other threads' calls. `logits_to_keep`, which selects the
tokens whose hidden states enter the output layer, belongs to one pass alone, and may be a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel


def records_prompt(model: PreTrainedModel, model_kwargs: Mapping[str, Any]) -> bool:
    """Whether [`last_token`] may take the place of `logits_to_keep`: not in compiled passes, nor
    where a forward pass of other packages may calculate with it as with a number."""
    compiled = model._compiled_call_impl or hasattr(model.forward, "_torchdynamo_orig_callable")
    takes_indices = type(model).forward.__module__.startswith("transformers.")
    return takes_indices and not compiled and model_kwargs.get("logits_to_keep") == 1


def last_token(states: list[torch.Tensor]) -> torch.Tensor:
    """`logits_to_keep=1` as an index, which adds what it selects from to `states`."""
    index = torch.tensor([-1]).as_subclass(_LastToken)
    index.states = states
    return index


class _LastToken(torch.Tensor):
    """The index of the last token of each row. Where it has been copied, it is only that."""

    states: list[torch.Tensor]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") != "__getitem__" or isinstance(args[0], cls):
            return super().__torch_function__(func, types, args, kwargs or {})
        states, index = args  # hidden_states[:, index, :]
        for each in index:
            if isinstance(each, cls) and hasattr(each, "states"):
                each.states.append(states)
        return states[tuple(slice(-1, None) if isinstance(each, cls) else each for each in index)]
