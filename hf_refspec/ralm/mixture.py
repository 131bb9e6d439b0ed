"""The distribution of a kNN-LM (Khandelwal et al. 2020, arXiv 1911.00172): the model's next token
mixed with what followed the nearest contexts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..check_count import check_count
from ..retrieval.retrieved import Retrieved
from .knn_datastore import DEFAULT_K, KnnDatastore
from .reading import Predictions

DEFAULT_LAMBDA = 0.25
DEFAULT_TEMPERATURE = 1.0


class Mixture:
    """The distribution of the next token: the model's and the neighbours'.

    Arguments are those of [`knn_lm`]; `None` stands for what was chosen on held-out text (see
    [`KnnDatastore.tune`]), or else for k 1024 (at most all), lambda 0.25 and temperature 1.
    """

    def __init__(
        self, datastore: Any, k: int | None, lambda_: float | None, temperature: float | None
    ) -> None:
        if not isinstance(datastore, KnnDatastore):
            raise TypeError(
                f"knn_datastore must be a KnnDatastore, but is {datastore!r}; make one with "
                "KnnDatastore.build(model, tokenizer, corpus, path)"
            )
        chosen = datastore.config.interpolation
        if k is None:
            k = min(DEFAULT_K, len(datastore)) if chosen is None else chosen.k
        if temperature is None:
            temperature = DEFAULT_TEMPERATURE if chosen is None else chosen.temperature
        by_distance = chosen if lambda_ is None else None
        lambda_ = DEFAULT_LAMBDA if lambda_ is None else lambda_
        check_count("k", k)
        if k > len(datastore):
            raise ValueError(
                f"k must be at most {len(datastore)}, the number of entries, but is {k}"
            )
        if not 0 <= lambda_ <= 1:
            raise ValueError(f"lambda_ must be from 0 to 1, but is {lambda_}")
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be above 0 and finite, but is {temperature}")
        self.datastore = datastore
        self.k = int(k)
        self.temperature = float(temperature)
        self._lambda = float(lambda_)
        self._by_distance = by_distance

    def __str__(self) -> str:
        if self._by_distance is not None:
            chosen = replace(self._by_distance, k=self.k, temperature=self.temperature)
            return str(chosen)
        return f"lambda {self._lambda:.2f}, temperature {self.temperature:.3g}, k {self.k:,}"

    def _log_weights(self, found: Retrieved) -> tuple[float, float]:
        """The logarithms of the weights of neighbours and model."""
        lambda_ = self._lambda
        if self._by_distance is not None:
            lambda_ = self._by_distance.lambda_at(-float(found.scores[0]))
        return (
            math.log(lambda_) if lambda_ > 0 else -math.inf,
            math.log(1 - lambda_) if lambda_ < 1 else -math.inf,
        )

    def log_probs(self, logits: torch.Tensor, found: Retrieved) -> torch.Tensor:
        """Log-probabilities of the next token, float32 of shape `(vocab_size,)`, given the model's
        logits and the neighbours of its hidden state."""
        of_knn, of_lm = self._log_weights(found)
        log_probs = torch.log_softmax(logits.float(), dim=-1) + of_lm
        tokens, probs = self.datastore.next_tokens(found, self.temperature)
        with np.errstate(divide="ignore"):  # a far neighbour may have probability 0
            log_knn = (np.log(probs) + of_knn).astype(np.float32)
        # Each token once: a GPU's sum over neighbours would depend on their order.
        places = torch.from_numpy(tokens).to(logits.device)
        mixed = torch.logaddexp(log_probs[places], torch.from_numpy(log_knn).to(logits.device))
        return log_probs.index_copy_(0, places, mixed)

    def log_probs_of(self, read: Predictions, neighbours: Sequence[Retrieved]) -> np.ndarray:
        """Log-probabilities of the tokens, float64 of shape `(n,)`, given the neighbours of the
        hidden state before each."""
        mixed = np.empty(len(read.targets))
        for i, (target, found) in enumerate(zip(read.targets, neighbours, strict=True)):
            of_knn, of_lm = self._log_weights(found)
            tokens, probs = self.datastore.next_tokens(found, self.temperature)
            with np.errstate(divide="ignore"):
                log_knn = np.log(probs[tokens == target].sum()) + of_knn
            mixed[i] = np.logaddexp(read.log_probs[i] + of_lm, log_knn)
        return mixed
