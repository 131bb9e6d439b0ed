"""Runs a model over texts, for the entries of a kNN datastore and for perplexity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..retrieval.vector_index import squared_lengths
from ..store.build.windows import read_windows
from .hidden_states import Layer, recorded


@torch.no_grad()
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
    with (
        recorded(model, layer) as hidden,
        tqdm(
            total=max_entries, unit=" tokens", unit_scale=True, disable=not progress or None
        ) as bar,
    ):
        for batch, ids in read_windows(model, tokenizer, corpus):
            model.base_model(ids, use_cache=False)
            assert hidden.states is not None
            states = hidden.states.float().numpy(force=True)
            for window, of_window in zip(batch, states, strict=True):
                keys.append(of_window[window.predicted].copy())
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


@torch.no_grad()
def read_predictions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Iterable[str],
    layer: Layer,
) -> Iterator[Predictions]:
    """Runs a model over texts, in overlapping windows that predict each token (but the first)
    once."""
    with recorded(model, layer) as hidden:
        for batch, ids in read_windows(model, tokenizer, text):
            logits = model(ids, use_cache=False).logits
            assert hidden.states is not None
            for row, window in enumerate(batch):
                log_probs = logits[row, window.predicted].float().log_softmax(dim=-1)
                places = torch.from_numpy(window.targets).to(log_probs.device)[:, None]
                yield Predictions(
                    window.targets,
                    log_probs.gather(1, places)[:, 0].double().numpy(force=True),
                    hidden.states[row, window.predicted].float().numpy(force=True),
                )


def checked_lengths(keys: np.ndarray) -> np.ndarray:
    """The squared length of each key, float32 of shape `(entries,)`; all keys must be finite."""
    lengths = squared_lengths(keys)
    if not np.isfinite(lengths).all():
        raise ValueError(
            f"the model's hidden states are not finite as {keys.dtype}; "
            + ("is the model damaged?" if keys.dtype == np.float32 else 'try "float32"')
        )
    return lengths
