"""The keys of a kNN-LM: the hidden states of a model that reads a corpus."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...index.vector_index import squared_lengths
from .hidden_states import Layer, recorded
from .windows import batches, context_length, padded, tokenized, windows

_PROBE_LENGTH = 8


@torch.no_grad()
def read_corpus(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    corpus: str | Iterable[str],
    layer: Layer,
    max_entries: int | None,
    progress: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Runs a model over a corpus; arguments as of [`KnnDatastore.build`].

    Returns:
        The keys, float32 of shape `(entries, dimension)`, and the tokens that followed them, int32
        of shape `(entries,)`.

    Raises:
        TypeError: If an entry of the corpus is not a string.
        ValueError: If the corpus has no text.
    """
    keys, values, entries = [], [], 0
    length = context_length(model)
    pieces = windows(tokenized(corpus, tokenizer), length)
    with (
        recorded(model, layer) as hidden,
        tqdm(total=max_entries, unit=" tokens", unit_scale=True, disable=not progress) as bar,
    ):
        for batch in batches(pieces, length):
            model.base_model(padded(batch, model.device), use_cache=False)
            assert hidden.states is not None
            states = hidden.states.float().numpy(force=True)
            for window, of_window in zip(batch, states, strict=True):
                predicted = slice(window.known - 1, len(window.ids) - 1)
                keys.append(of_window[predicted].copy())
                values.append(window.ids[window.known :].astype(np.int32))
                entries += len(values[-1])
                bar.update(len(values[-1]))
            if max_entries is not None and entries >= max_entries:
                break
    if entries == 0:
        raise ValueError("corpus has no text of two tokens or more: there is nothing to keep")
    return np.concatenate(keys)[:max_entries], np.concatenate(values)[:max_entries]


def checked_lengths(keys: np.ndarray) -> np.ndarray:
    """The squared length of each key, float32 of shape `(entries,)`.

    Raises:
        ValueError: If a key is not finite.
    """
    lengths = squared_lengths(keys)
    if not np.isfinite(lengths).all():
        raise ValueError(
            f"the model's hidden states are not finite as {keys.dtype}; "
            + ("is the model damaged?" if keys.dtype == np.float32 else 'try "float32"')
        )
    return lengths


@torch.no_grad()
def probe(model: PreTrainedModel, layer: Layer) -> np.ndarray:
    """A model's hidden state after a fixed text, float32 of shape `(dimension,)`: tells whose keys
    they are."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(1, _PROBE_LENGTH + 1, device=model.device)[None] % vocab_size
    with recorded(model, layer) as hidden:
        model.base_model(ids, use_cache=False)
        return hidden.last().float().numpy(force=True)
