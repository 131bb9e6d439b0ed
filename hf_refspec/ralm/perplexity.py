"""The perplexity of a language model, alone or as a kNN-LM."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .hidden_states import Layer
from .knn_datastore import KnnDatastore
from .mixture import Mixture
from .reading import read_predictions

# Below this fraction of the query's squared length, a squared distance counts as zero: hidden
# states of the same text differ by rounding alone.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Reading:
    """How well a text was predicted."""

    tokens: int  # that were predicted
    alone: float  # the perplexity of the model alone
    mixed: float | None  # that of the kNN-LM, if there is a datastore
    known: int  # tokens with an entry at distance zero: of a corpus text with the same beginning


def read(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Iterable[str],
    mixture: Mixture | None,
) -> Reading:
    """Reads texts with a model and, given a mixture, with a kNN-LM; raises as [`perplexity`]."""
    layer: Layer = "last_hidden"
    if mixture is not None:
        mixture.datastore.check_tokenizer(tokenizer)
        mixture.datastore.check_model(model)
        layer = mixture.datastore.config.layer
    tokens, known, alone, mixed = 0, 0, 0.0, 0.0
    for each in read_predictions(model, tokenizer, text, layer):
        tokens += len(each.targets)
        alone -= float(each.log_probs.sum())
        if mixture is not None:
            found = mixture.datastore.search(list(each.states), mixture.k)
            mixed -= float(mixture.log_probs_of(each, found).sum())
            distances = -np.array([neighbours.scores[0] for neighbours in found])
            known += int((distances <= _ROUNDING * (each.states**2).sum(axis=1)).sum())
    if tokens == 0:
        raise ValueError("text must have at least two tokens: there is nothing to predict")
    with_datastore = None if mixture is None else math.exp(mixed / tokens)
    return Reading(tokens, math.exp(alone / tokens), with_datastore, known)


def perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Iterable[str],
    knn_datastore: KnnDatastore | None = None,
    k: int | None = None,
    lambda_: float | None = None,
    temperature: float | None = None,
) -> float:
    """The perplexity of a text, or of several together: of the model, or of the kNN-LM.

    A long text is read in overlapping windows that predict every token but the first once.

    Args:
        model (`PreTrainedModel`): The model.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        text (`str` or iterable of them): What is read.
        knn_datastore ([`KnnDatastore`], *optional*): Without it, only the model is asked.
        k, lambda_, temperature: As of [`knn_lm`].

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the text has fewer than two tokens, the datastore is of another model, or an
            argument is out of range.
    """
    if knn_datastore is None:
        return read(model, tokenizer, text, None).alone
    found = read(model, tokenizer, text, Mixture(knn_datastore, k, lambda_, temperature)).mixed
    assert found is not None
    return found
