"""Runs a model over texts, for the entries of a kNN datastore and for perplexity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..retrieval.vector_index import squared_lengths
from ..store.build.windows import Window, read_windows
from .hidden_states import Layer, recorded


def read_corpus(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    corpus: str | Iterable[str],
    layer: Layer,
    max_entries: int | None,
    progress: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """The keys of a corpus, float32 of shape `(entries, dimension)`, and the tokens that followed
    them, int32 of shape `(entries,)`; arguments and errors as of [`KnnDatastore.build`]."""
    keys, values, entries = [], [], 0
    hidden = not progress or None
    with tqdm(total=max_entries, unit=" tokens", unit_scale=True, disable=hidden) as bar:
        for window, states, _ in _states(model, model.base_model, tokenizer, corpus, layer):
            keys.append(states.copy())
            values.append(window.targets.astype(np.int32))
            entries += len(values[-1])
            bar.update(len(values[-1]))
            if max_entries is not None and entries >= max_entries:
                break
    if entries == 0:
        raise ValueError("corpus has no text of two tokens or more: there is nothing to keep")
    return np.concatenate(keys)[:max_entries], np.concatenate(values)[:max_entries]


@dataclass(frozen=True)
class Predictions:
    """Consecutive tokens of a text, and what a model predicts at each."""

    targets: np.ndarray  # int64 of shape (n,): the tokens
    log_probs: np.ndarray  # float64 of shape (n,): theirs, by the model
    states: np.ndarray  # float32 of shape (n, dimension): the hidden states before them


def read_predictions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Iterable[str],
    layer: Layer,
) -> Iterator[Predictions]:
    """Runs a model over texts, in overlapping windows that predict each token (but the first)
    once."""
    for window, states, logits in _states(model, model, tokenizer, text, layer):
        log_probs = logits.float().log_softmax(dim=-1)
        places = torch.from_numpy(window.targets).to(log_probs.device)[:, None]
        of_targets = log_probs.gather(1, places)[:, 0].double().numpy(force=True)
        yield Predictions(window.targets, of_targets, states)


@torch.no_grad()
def _states(
    model: PreTrainedModel,
    decoder: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: str | Iterable[str],
    layer: Layer,
) -> Iterator[tuple[Window, np.ndarray, torch.Tensor]]:
    """Runs a model, or its decoder alone, over the windows of texts; yields each window with the
    hidden states before the tokens that it predicts, float32, and the output there."""
    with recorded(model, layer) as hidden:
        for batch, ids in read_windows(model, tokenizer, texts):
            output = decoder(ids, use_cache=False)[0]
            assert hidden.states is not None
            for row, window in enumerate(batch):
                states = hidden.states[row, window.predicted].float().numpy(force=True)
                yield window, states, output[row, window.predicted]


def checked_lengths(keys: np.ndarray) -> np.ndarray:
    """The squared length of each key, float32 of shape `(entries,)`; all keys must be finite."""
    lengths = squared_lengths(keys)
    if not np.isfinite(lengths).all():
        raise ValueError(
            f"the model's hidden states are not finite as {keys.dtype}; "
            + ("is the model damaged?" if keys.dtype == np.float32 else 'try "float32"')
        )
    return lengths
