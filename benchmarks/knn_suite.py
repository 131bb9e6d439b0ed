"""The datastores and prompts of the suite `knn`: a kNN-LM that continues Python files."""

from __future__ import annotations

from argparse import Namespace
from functools import cache, partial
from itertools import islice, product
from pathlib import Path

from retrieval_settings import Setting, retrieving_methods, speculations
from transformers import PreTrainedTokenizerBase

from hf_refspec.apps.bench.methods import Method
from hf_refspec.ralm.knn_datastore import KnnDatastore
from hf_refspec.ralm.knn_lm import knn_lm
from hf_refspec.ralm.options import Speculation
from hf_refspec.store.build.presets import python_stdlib

NEIGHBOURS = (1, 1024)
PROMPTS, PROMPT_TOKENS, LEAST_TOKENS = 10, 256, 384  # from files of more than LEAST_TOKENS
EVERY = 10  # file of the library is one to continue
LAMBDA, TEMPERATURE = 0.25, 10.0
WITHOUT_PQ_INDEX = "ours, psa, without the PQ index"


def knn_settings(args: Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Setting]:
    """Exact and approximate search, with few and many neighbours, greedy and sampled."""
    if args.replay:
        raise ValueError("knn needs the model's own text; run it without --replay")
    folder = args.knn_datastore
    flat = KnnDatastore(folder)
    flat.check_tokenizer(tokenizer)

    @cache  # the graph of an HNSW index takes a while to build
    def opened(index: str) -> KnnDatastore:
        return flat if index == "flat" else KnnDatastore(folder, "hnsw")

    def methods(index: str, k: int, ablate: bool) -> list[Method]:
        store = opened(index)
        settings = speculations(ablate)
        if store.pq_index is not None:
            settings[WITHOUT_PQ_INDEX] = Speculation(pq_index=False)
        options = {"knn_datastore": store, "k": k, "lambda_": LAMBDA, "temperature": TEMPERATURE}
        return retrieving_methods(settings, custom_generate=knn_lm, **options)

    return [
        Setting(
            f"{index}, k={k}, {'sampled' if sampled else 'greedy'}",
            len(flat),
            partial(methods, index, k, args.ablate and not sampled),
            sampled=sampled,
        )
        for index, k, sampled in product(("flat", "hnsw"), NEIGHBOURS, (False, True))
    ]


def knn_prompts(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, list[int]]]:
    """Names and beginnings of the long ones among every tenth file of the standard library.

    The other files are for the datastore, see benchmarks/README.md.
    """
    tokenized = (
        (f"{path.parent.name}/{path.name}", tokenizer(_read(path), verbose=False)["input_ids"])
        for path in python_stdlib()[::EVERY]
    )
    long = ((name, ids[:PROMPT_TOKENS]) for name, ids in tokenized if len(ids) > LEAST_TOKENS)
    return list(islice(long, PROMPTS))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
