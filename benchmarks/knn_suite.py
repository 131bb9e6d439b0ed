"""The datastores and prompts of the suite `knn`: a kNN-LM that continues Python files."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator
from functools import cache, partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
from retrieval_settings import BASELINE, OURS, Setting, published_strides, retrieving_methods
from transformers import PreTrainedTokenizerBase

from hf_refspec.apps.bench.methods import Method
from hf_refspec.ralm.knn_datastore import KnnDatastore
from hf_refspec.ralm.knn_lm import knn_lm
from hf_refspec.ralm.options import Speculation
from hf_refspec.retrieval.flat import index_type
from hf_refspec.retrieval.vector_index import squared_lengths
from hf_refspec.store.build.presets import python_stdlib

NEIGHBOURS = (1, 1024)
SWEPT, STRIDES = (1, 4, 16, 64, 256, 1024), (3, 5)
PROMPTS, PROMPT_TOKENS, LEAST_TOKENS = 10, 256, 384  # from files of more than LEAST_TOKENS
EVERY = 10  # file of the library is one to continue
LAMBDA, TEMPERATURE = 0.25, 10.0
PUBLISHED_KNN = "as published, s"
WITHOUT_PQ_INDEX = "ours, psa, without the PQ index"


class PaddedKnnDatastore(KnnDatastore):
    """A kNN datastore with random keys added, so that exact searches take longer.

    They are as long as the others, and further from every query than those.
    """

    def __init__(self, path: Path, distractors: int) -> None:
        super().__init__(path)
        rng = np.random.default_rng(0)
        added = rng.standard_normal((distractors, self.config.dimension), dtype=np.float32)
        added *= np.linalg.norm(self.keys, axis=1).mean() / np.sqrt(self.config.dimension)
        self.keys = np.concatenate([self.keys, added])
        self.values = np.pad(self.values, (0, distractors))
        self._index = index_type("flat")(self.keys, squared_lengths(self.keys), "l2")

    def __len__(self) -> int:
        return len(self.keys)


def knn_settings(args: Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Setting]:
    """Exact and approximate search, with few and many neighbours, greedy and sampled; to ablate,
    greedy, with more numbers of neighbours and with fixed strides."""
    if args.replay:
        raise ValueError("knn needs the model's own text; run it without --replay")
    folder = args.knn_datastore
    flat = KnnDatastore(folder)
    flat.check_tokenizer(tokenizer)

    @cache  # the graph of an HNSW index takes a while to build
    def opened(index: str) -> KnnDatastore:
        if index == "hnsw":
            return KnnDatastore(folder, "hnsw")
        return PaddedKnnDatastore(flat.path, args.distractors) if args.distractors else flat

    def methods(index: str, k: int) -> list[Method]:
        store = opened(index)
        settings = knn_speculations(args.ablate)
        if store.pq_index is not None:
            settings[WITHOUT_PQ_INDEX] = Speculation(pq_index=False)
        options = {"knn_datastore": store, "k": k, "lambda_": LAMBDA, "temperature": TEMPERATURE}
        return retrieving_methods(settings, custom_generate=knn_lm, **options)

    neighbours, kinds = (SWEPT, (False,)) if args.ablate else (NEIGHBOURS, (False, True))
    return [
        Setting(
            f"{index}, k={k}, {'sampled' if sampled else 'greedy'}",
            len(flat) + (args.distractors if index == "flat" else 0),
            partial(methods, index, k),
            sampled=sampled,
        )
        for index, k, sampled in product(("flat", "hnsw"), neighbours, kinds)
    ]


def knn_speculations(ablate: bool) -> dict[str, Speculation | None]:
    """The settings of speculation, by name: RaLMSpec with OS3, to ablate also with fixed strides
    (arXiv 2401.14021, section 5.3), and ours."""
    strides = published_strides("", STRIDES) if ablate else {}
    published = {PUBLISHED_KNN: Speculation.published("s")}
    return {BASELINE: None, **published, **strides, OURS: Speculation()}


def library_files() -> Iterator[tuple[str, str]]:
    """Every tenth file of the standard library; the other ones are for the datastore, see
    benchmarks/README.md."""
    for path in python_stdlib()[::EVERY]:
        text = path.read_text(encoding="utf-8", errors="replace")
        yield f"{path.parent.name}/{path.name}", text


def knn_prompts(
    texts: Iterable[tuple[Any, str]], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[Any, list[int]]]:
    """Names and beginnings of the long ones among texts."""
    tokenized = ((name, tokenizer(text, verbose=False)["input_ids"]) for name, text in texts)
    long = ((name, ids[:PROMPT_TOKENS]) for name, ids in tokenized if len(ids) > LEAST_TOKENS)
    return list(islice(long, PROMPTS))
