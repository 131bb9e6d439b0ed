"""The target model's best next tokens inside the prompt, which the prefill has nearly computed.

`generate` asks the model for the logits after the last token of the prompt alone. The
output layer applied to the hidden states of the others tells what the model expects there, at the
cost of that layer.

A hook on the model would also run in other threads' calls. `logits_to_keep`, which selects the
tokens whose hidden states enter the output layer, belongs to one pass alone, and may be a tensor.
Selecting more tokens is no substitute: the logits of the last one would round otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..drafting.top_tokens import TopTokens, top_tokens
from ..transformers_names import is_compiled

# Tokens whose logits are there at once: 64 of a vocabulary of 150,000 take 38 MB in float32.
_PIECE = 64
# For fewer tokens of a prompt the output layer's weights are not read again.
_FEWEST = 4
# How far logits of the same states may be apart, relative to the largest: in bfloat16 a pass over
# one token rounds otherwise than one over several, by less than a hundredth.
_ROUNDING = 0.02


def records_prompt(model: PreTrainedModel, model_kwargs: Mapping[str, Any]) -> bool:
    """Whether [`last_token`] may take the place of `logits_to_keep`: not in compiled passes, nor
    where a forward pass of other packages may calculate with it as with a number."""
    takes_indices = type(model).forward.__module__.startswith("transformers.")
    return takes_indices and not is_compiled(model) and model_kwargs.get("logits_to_keep") == 1


def last_token(states: list[torch.Tensor]) -> torch.Tensor:
    """`logits_to_keep=1` as an index, which adds what it selects from to `states`."""
    index = torch.tensor([-1]).as_subclass(_LastToken)
    index.states = states
    return index


class _LastToken(torch.Tensor):
    """The index of the last token of each row. A copy of it is an index and nothing else."""

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
        for part in index:
            if isinstance(part, cls) and hasattr(part, "states"):
                part.states.append(states)
        return states[tuple(slice(-1, None) if isinstance(part, cls) else part for part in index)]


def prompt_top_tokens(
    model: PreTrainedModel,
    states: Sequence[torch.Tensor],
    logits: torch.Tensor,
    k: int,
    fraction: float,
) -> TopTokens | None:
    """The best next tokens after the last tokens of the prompts, but not after the very last:
    `(R, m)`. A `fraction` of the prefill's cost pays for m tokens; `None` if they are too few, or
    if the model's logits are not those of its output layer."""
    head = model.get_output_embeddings()
    if head is None or not states:
        return None
    hidden = torch.cat(list(states), dim=1)  # (R, n, hidden_size)
    positions = hidden.shape[1]
    # What the output layer costs for a token, beside the layers before it; quantised ones may have
    # no parameters.
    embeddings = [*head.parameters(), *model.get_input_embeddings().parameters()]
    left_out = {id(weight) for weight in embeddings}
    layers = [weight for weight in model.get_decoder().parameters() if id(weight) not in left_out]
    head_size = sum(weight.numel() for weight in head.parameters())
    cost = max(head_size, 1) / max(sum(weight.numel() for weight in layers), 1)
    count = int(min(positions - 1, fraction * positions / cost))
    if count < _FEWEST or hidden.shape[0] != logits.shape[0]:
        return None
    weight = getattr(head, "weight", None)  # of quantised layers it may be a method
    if isinstance(weight, torch.Tensor) and weight.shape[-1] != hidden.shape[-1]:
        return None  # some models project before the output layer
    pieces: list[TopTokens] = []
    for piece in reversed(hidden[:, positions - 1 - count :].split(_PIECE, dim=1)):
        piece_logits = head(piece)
        if not pieces:  # some models scale or cap behind the output layer
            last = piece_logits[:, -1:].float()
            expected = logits.float()
            if last.shape != expected.shape:
                return None
            if not (last - expected).abs().max() <= _ROUNDING * expected.abs().max():
                return None
        pieces.insert(0, top_tokens(piece_logits, k))
    whole = (np.concatenate(parts, axis=1) for parts in zip(*pieces, strict=True))
    return TopTokens(*(array[:, :-1] for array in whole))
