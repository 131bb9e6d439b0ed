"""The perplexity of texts by a model alone and as a kNN-LM, for each lambda and temperature.

    python benchmarks/knn_perplexity.py KNN TEXT_FILE ... [--model M] [--k 1024] [--tokens 8192]

Choose on texts that the datastore was not built from, and measure on others.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from suites import table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_refspec.apps.shared.loading import load_model, load_tokenizer
from hf_refspec.ralm.knn_datastore import KnnDatastore, read_windows, recorded

LAMBDAS = (0.05, 0.1, 0.25, 0.5, 0.75)
TEMPERATURES = 2.0 ** np.arange(-8, 3, 2)  # in relation to the median distance of all neighbours


@dataclass(frozen=True)
class Reading:
    """The predictions of a model and of its neighbours for n tokens."""

    log_lm: np.ndarray  # float64 of shape (n,): the model's log-probability of each token
    scores: np.ndarray  # float32 of shape (n, k): minus the neighbours' squared distances
    right: np.ndarray  # bool of shape (n, k): which neighbours were followed by the token

    def perplexity(self, lambda_: float, temperature: float = 1.0) -> float:
        """The perplexity of the kNN-LM (Khandelwal et al. 2020, equations 2 and 3)."""
        weights = np.exp((self.scores - self.scores[:, :1]).astype(np.float64) / temperature)
        knn = (weights * self.right).sum(axis=1) / weights.sum(axis=1)
        mixed = (1 - lambda_) * np.exp(self.log_lm) + lambda_ * knn
        return float(np.exp(-np.log(mixed).mean()))


@torch.no_grad()
def read(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    store: KnnDatastore,
    texts: Iterable[str],
    k: int,
    most: int,
) -> Reading:
    """Runs the model over texts and searches before each token, until there are `most` tokens."""
    store.check_tokenizer(tokenizer)
    store.check_model(model)
    log_lm, scores, right, count = [], [], [], 0
    with recorded(model, store.config.layer) as hidden:
        for windows, ids in read_windows(model, tokenizer, texts):
            log_probs = model(ids, use_cache=False).logits.double().log_softmax(dim=-1)
            for row, window in enumerate(windows):
                places = torch.from_numpy(window.targets).to(ids.device)[:, None]
                of_targets = log_probs[row, window.predicted].gather(1, places)[:, 0]
                log_lm.append(of_targets.numpy(force=True))
                states = hidden.states[row, window.predicted].float().numpy(force=True)
                found = store.search(list(states), min(k, len(store)))
                scores.append(np.stack([one.scores for one in found]))
                values = store.values[np.stack([one.ids for one in found])]
                right.append(values == window.targets[:, None])
                count += len(window.targets)
            if count >= most:
                break
    if count == 0:
        raise ValueError("the texts must have at least two tokens: there is nothing to predict")
    return Reading(*(np.concatenate(each)[:most] for each in (log_lm, scores, right)))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", metavar="KNN", help="a kNN datastore: a folder or a Hub id")
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXT_FILE")
    parser.add_argument("--model", help="what the datastore was built with")
    parser.add_argument("--k", type=int, default=1024, help="neighbours of each token")
    parser.add_argument("--tokens", type=int, default=8192, help="the most that are predicted")
    args = parser.parse_args(arguments)
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in args.texts)
    store = KnnDatastore.from_pretrained(args.store)
    model = load_model(args.model)
    tokenizer = load_tokenizer(args.model)
    reading = read(model, tokenizer, store, texts, args.k, args.tokens)
    temperatures = -float(np.median(reading.scores)) * TEMPERATURES
    print(f"{len(reading.log_lm):,} tokens, k={reading.scores.shape[1]:,}")
    print(f"alone: {reading.perplexity(0):.2f}")
    rows = [
        [lambda_, *(f"{reading.perplexity(lambda_, each):.2f}" for each in temperatures)]
        for lambda_ in LAMBDAS
    ]
    print(table(["lambda", *(f"temperature {each:.3g}" for each in temperatures)], rows))


if __name__ == "__main__":
    main()
