"""Long texts as windows that fit into a model, so that every token is read once and in context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LONGEST = 1024
_BATCH_TOKENS = 8192


@dataclass(frozen=True)
class Window:
    """A piece of a text.

    Attributes:
        ids (`np.ndarray`, int64 of shape `(n,)`): Its tokens.
        known (`int`): How many of them only give context, the first token of the text among them:
            the others are each predicted from what is before it.
    """

    ids: np.ndarray
    known: int


def context_length(model: PreTrainedModel) -> int:
    """How many tokens a window has: what the model takes, and no more than is worth its time."""
    config = model.config.get_text_config(decoder=True)
    return min(getattr(config, "max_position_embeddings", None) or _LONGEST, _LONGEST)


def tokenized(
    texts: str | Iterable[str], tokenizer: PreTrainedTokenizerBase
) -> Iterator[np.ndarray]:
    """The tokens of each text (int64), with the special tokens that a prompt gets.

    Raises:
        TypeError: If one is not a string.
    """
    for i, text in enumerate([texts] if isinstance(texts, str) else texts):
        if not isinstance(text, str):
            raise TypeError(f"the corpus must be of strings, but entry {i} is {text!r:.80}")
        yield np.array(tokenizer(text, verbose=False)["input_ids"], dtype=np.int64)


def windows(texts: Iterable[np.ndarray], length: int) -> Iterator[Window]:
    """Cuts texts into windows that overlap by a quarter."""
    overlap = length // 4
    for ids in texts:
        known = 1
        for begin in range(0, max(len(ids) - overlap, 1), length - overlap):
            window = ids[begin : begin + length]
            if len(window) > known:
                yield Window(window, known)
            known = overlap


def batches(pieces: Iterable[Window], length: int) -> Iterator[list[Window]]:
    """As many windows at a time as a forward pass does well with, in order."""
    pieces = iter(pieces)
    while batch := list(islice(pieces, max(_BATCH_TOKENS // length, 1))):
        yield batch


def padded(batch: list[Window], device: torch.device) -> torch.Tensor:
    """The tokens of a batch, int64 of shape `(batch, longest)`. The padding is behind the text, so
    that nothing in the text can see it."""
    ids = np.zeros((len(batch), max(len(window.ids) for window in batch)), dtype=np.int64)
    for row, window in zip(ids, batch, strict=True):
        row[: len(window.ids)] = window.ids
    return torch.from_numpy(ids).to(device)
