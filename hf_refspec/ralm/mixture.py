"""The distribution of a kNN-LM (Khandelwal et al. 2020, arXiv 1911.00172): the model's next token
mixed with what followed the nearest contexts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ..index.retrieved import Retrieved
from ..store.knn_datastore import KnnDatastore

DEFAULT_K = 1024
DEFAULT_LAMBDA = 0.25


class Mixture:
    """The distribution of the next token: the model's and the neighbours'.

    Args:
        datastore ([`KnnDatastore`]): Where neighbours are looked up.
        k (`int`): How many.
        lambda_ (`float`): How much they count.
        temperature (`float`): Squared distances are divided by it.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If it has a value that it cannot have.
    """

    def __init__(self, datastore: Any, k: int, lambda_: float, temperature: float) -> None:
        if not isinstance(datastore, KnnDatastore):
            raise TypeError(
                f"knn_datastore must be a KnnDatastore, but is {datastore!r}; make one with "
                "KnnDatastore.build(model, tokenizer, corpus, path)"
            )
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)):
            raise TypeError(f"k must be an int, but is {k!r}")
        if not 1 <= k <= len(datastore):
            raise ValueError(
                f"k must be from 1 to {len(datastore)}, the entries of the datastore, but is {k}"
            )
        if not 0 <= lambda_ <= 1:
            raise ValueError(f"lambda_ must be from 0 to 1, but is {lambda_}")
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be above 0 and finite, but is {temperature}")
        self.datastore = datastore
        self.k = int(k)
        self._temperature = float(temperature)
        self._log_knn = math.log(lambda_) if lambda_ > 0 else -math.inf
        self._log_lm = math.log(1 - lambda_) if lambda_ < 1 else -math.inf

    def log_probs(self, logits: torch.Tensor, found: Retrieved) -> torch.Tensor:
        """Log-probabilities of the next token, float32 of shape `(vocab_size,)`.

        Args:
            logits (`torch.Tensor` of shape `(vocab_size,)`): The model's.
            found ([`Retrieved`]): The neighbours of its hidden state.
        """
        log_probs = torch.log_softmax(logits.float(), dim=-1) + self._log_lm
        tokens, probs = self.datastore.next_tokens(found, self._temperature)
        with np.errstate(divide="ignore"):  # of a far neighbour nothing may be left
            log_knn = (np.log(probs) + self._log_knn).astype(np.float32)
        # Each token once: on a GPU a sum over neighbours would depend on their order.
        places = torch.from_numpy(tokens).to(logits.device)
        mixed = torch.logaddexp(log_probs[places], torch.from_numpy(log_knn).to(logits.device))
        return log_probs.index_copy_(0, places, mixed)

    def log_probs_of(
        self, targets: np.ndarray, log_lm: np.ndarray, states: np.ndarray
    ) -> np.ndarray:
        """Log-probabilities of given tokens, float64 of shape `(n,)`.

        Args:
            targets (`np.ndarray`, int64 of shape `(n,)`): The tokens.
            log_lm (`np.ndarray`, float64 of shape `(n,)`): What they are by the model alone.
            states (`np.ndarray`, float32 of shape `(n, dimension)`): The hidden states before them.
        """
        knn = np.zeros(len(targets))
        for i, found in enumerate(self.datastore.search(list(states), self.k)):
            tokens, probs = self.datastore.next_tokens(found, self._temperature)
            knn[i] = probs[tokens == targets[i]].sum()
        with np.errstate(divide="ignore"):
            return np.logaddexp(log_lm + self._log_lm, np.log(knn) + self._log_knn)
