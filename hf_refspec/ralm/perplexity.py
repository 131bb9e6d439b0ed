"""The perplexity of a language model, alone or as a kNN-LM."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..store.build.hidden_states import Layer, recorded
from ..store.build.windows import read_windows
from ..store.knn_datastore import KnnDatastore
from .mixture import DEFAULT_K, DEFAULT_LAMBDA, Mixture


@torch.no_grad()
def perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Iterable[str],
    knn_datastore: KnnDatastore | None = None,
    k: int = DEFAULT_K,
    lambda_: float = DEFAULT_LAMBDA,
    temperature: float = 1.0,
) -> float:
    """The perplexity of a text, or of several together: of the model, or of the kNN-LM.

    A long text is read in windows that overlap, each token once (but for the first of each text,
    which nothing comes before).

    Args:
        model (`PreTrainedModel`): The model.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        text (`str` or iterable of them): What is read.
        knn_datastore ([`KnnDatastore`], *optional*): Without it, only the model is asked.
        k, lambda_, temperature: As of [`knn_lm`].

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the text has fewer than two tokens, or an argument is none that it can be.
    """
    mixture = None
    if knn_datastore is not None:
        mixture = Mixture(knn_datastore, k, lambda_, temperature)
        knn_datastore.check_tokenizer(tokenizer)
        knn_datastore.check_model(model)
    layer: Layer = "last_hidden" if knn_datastore is None else knn_datastore.config.layer
    total, count = 0.0, 0
    with recorded(model, layer) as hidden:
        for batch, ids in read_windows(model, tokenizer, text):
            logits = model(ids, use_cache=False).logits
            for row, window in enumerate(batch):
                predicted, targets = window.predicted, window.targets
                log_probs = logits[row, predicted].float().log_softmax(dim=-1)
                places = torch.from_numpy(targets).to(log_probs.device)[:, None]
                found = log_probs.gather(1, places)[:, 0].double().numpy(force=True)
                if mixture is not None:
                    assert hidden.states is not None
                    states = hidden.states[row, predicted].float().numpy(force=True)
                    found = mixture.log_probs_of(targets, found, states)
                total -= float(found.sum())
                count += len(targets)
    if count == 0:
        raise ValueError("text must have at least two tokens: there is nothing to predict")
    return math.exp(total / count)
