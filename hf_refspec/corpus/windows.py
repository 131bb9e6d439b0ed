"""Long texts cut into windows that fit a model; each token is predicted once, in context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..text_config import context_length, text_config

_LONGEST = 1024
_BATCH_TOKENS = 8192


@dataclass(frozen=True)
class Window:
    """A piece of a text."""

    ids: np.ndarray  # int64 of shape (n,)
    # Tokens that are only context, the text's first one among them; each of the others is predicted
    # from the tokens before it.
    known: int

    @property
    def predicted(self) -> slice:
        """The positions that predict a target."""
        return slice(self.known - 1, len(self.ids) - 1)

    @property
    def targets(self) -> np.ndarray:
        """The predicted tokens, int64 of shape `(n - known,)`."""
        return self.ids[self.known :]


def read_windows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: str | Iterable[str]
) -> Iterator[tuple[list[Window], torch.Tensor]]:
    """Cuts texts into windows of the model's context length, or at most 1,024 tokens, and yields
    batches of them with their tokens, int64 of shape `(batch, longest)`, padded on the right."""
    length = min(context_length(model) or _LONGEST, _LONGEST)

    def tokenized() -> Iterator[np.ndarray]:
        for text in [texts] if isinstance(texts, str) else texts:
            # With the special tokens that a prompt gets.
            yield np.array(tokenizer(text, verbose=False)["input_ids"], dtype=np.int64)

    pieces = windows(tokenized(), length, text_config(model).vocab_size)
    while batch := list(islice(pieces, max(_BATCH_TOKENS // length, 1))):
        rows = [torch.from_numpy(window.ids) for window in batch]
        yield batch, pad_sequence(rows, batch_first=True).to(model.device)


def windows(texts: Iterable[np.ndarray], length: int, vocab_size: int) -> Iterator[Window]:
    """Cuts texts (n,) into windows that overlap by a quarter; refuses ids that the model lacks."""
    overlap = length // 4
    for number, ids in enumerate(texts):
        if len(ids) and ids.max() >= vocab_size:
            raise ValueError(
                f"document {number} has the id {ids.max()}, outside of the model's vocabulary of "
                f"{vocab_size}: the tokenizer has tokens that the model does not; remove their text"
            )
        known = 1
        for begin in range(0, max(len(ids) - overlap, 1), length - overlap):
            window = ids[begin : begin + length]
            if len(window) > known:
                yield Window(window, known)
            known = overlap
