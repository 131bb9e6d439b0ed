"""A kNN-LM with its look-ups speculated, against waiting for every one of them.

It goes on from where files of the standard library begin, which the bundled model has not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import islice, product
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..demo import corpus
from ..ralm.knn_lm import knn_lm
from ..ralm.options import Speculation
from ..ralm.stats import RetrievalStats
from ..store.build.hidden_states import recorded
from ..store.knn_datastore import KnnDatastore
from .measure import Bench
from .retrieval_ways import (
    BATCHES,
    WITHOUT_SKETCH,
    RetrievalWay,
    ablations,
    fixed_strides,
    main_ways,
    time_searches,
    time_ways,
    without_retrieval,
)
from .said import Said

NEIGHBOURS = (1, 1024)
PROMPTS, PROMPT, NEW_TOKENS = 10, 256, 128
LAMBDA, TEMPERATURE = 0.25, 10.0


class KnnStores:
    """A datastore, searched exactly and approximately.

    Args:
        folder (`str`): Where it is.
        tokenizer (`PreTrainedTokenizerBase`): The language model's.

    Attributes:
        flat ([`KnnDatastore`]): The one that is searched exactly.
        warm (`set`): The settings that have been used.

    Raises:
        OSError, ValueError: If it cannot be opened, is another tokenizer's, or is too small.
        ImportError: If FAISS is missing.
    """

    def __init__(self, folder: str, tokenizer: PreTrainedTokenizerBase) -> None:
        try:
            self.flat = KnnDatastore(folder)
            self.flat.check_tokenizer(tokenizer)
        except (OSError, ValueError) as error:
            raise ValueError(f"--knn-datastore {folder} cannot be used: {error}") from error
        if len(self.flat) < max(NEIGHBOURS):
            raise ValueError(
                f"--knn-datastore {folder} has {len(self.flat)} entries, fewer than the "
                f"{max(NEIGHBOURS)} neighbours that are looked up; build a larger one"
            )
        if find_spec("faiss") is None:
            raise ImportError("the suite needs faiss; install the extra `retrieval`")
        self.warm: set[str] = set()

    @cached_property
    def hnsw(self) -> KnnDatastore:
        """Its graph is made when it is first needed, which takes a while."""
        return KnnDatastore(self.flat.path, "hnsw")


@dataclass(frozen=True)
class KnnPrompt:
    """The beginning of a file, to go on from with each index and number of neighbours.

    Attributes:
        id, name (`str`): What it is called; the file's name.
        ids (`list[int]`): Its first tokens.
        ablated (`bool`): Whether all ways are measured, or the main ones.
        stores ([`KnnStores`]): All prompts have the same.
        runs (`int`): How often each way is measured.
        index (`str`), k (`int`), sampled (`bool`): How it is gone on from.
    """

    id: str
    name: str
    ids: list[int]
    ablated: bool
    stores: KnnStores
    runs: int
    index: str = "flat"
    k: int = NEIGHBOURS[0]
    sampled: bool = False

    @property
    def setting(self) -> str:
        return f"{self.index}, k={self.k}, {'sampled' if self.sampled else 'greedy'}"


def with_each_setting(prompt: KnnPrompt) -> list[KnnPrompt]:
    """A prompt once for each index and number of neighbours, greedy and sampled.

    Ablations are greedy alone: sampled text is no different to them.
    """
    settings = (
        replace(prompt, index=index, k=k, sampled=sampled, ablated=prompt.ablated and not sampled)
        for index, k, sampled in product(("flat", "hnsw"), NEIGHBOURS, (False, True))
    )
    return [replace(each, id=f"{prompt.name}, {each.setting}") for each in settings]


def knn_prompts(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, list[int]]]:
    """Names and beginnings of files that are long enough."""
    root = corpus.library_root()
    tokenized = (
        (
            path.relative_to(root).as_posix(),
            tokenizer(corpus.read_source(path), verbose=False)["input_ids"],
        )
        for path in corpus.heldout_files()
    )
    long = ((name, ids[:PROMPT]) for name, ids in tokenized if len(ids) > PROMPT + NEW_TOKENS)
    return list(islice(long, PROMPTS))


def measure_knn(bench: Bench, prompt: KnnPrompt) -> Iterator[dict[str, Any]]:
    """Goes on in all ways, and yields what comes of it.

    Raises:
        ContextTooShortError: If the model's context does not hold it.
        IdsDifferError: If ids differ in float32.
        ValueError: If the datastore is another model's.
    """
    bench.check_context(prompt.id, prompt.ids, NEW_TOKENS)
    store = prompt.stores.hnsw if prompt.index == "hnsw" else prompt.stores.flat
    generate = partial(_generate, bench, prompt.ids, store, prompt.k, prompt.sampled)
    ways = [*main_ways(), *without_retrieval(bench.takes_look_up)]
    if store.pq_index is not None:
        ways.append(RetrievalWay(WITHOUT_SKETCH, Speculation(pq_index=False)))
    if prompt.setting not in prompt.stores.warm:  # the first calls compile and load
        prompt.stores.warm.add(prompt.setting)
        for way in ways:
            generate(way, RetrievalStats())
    if prompt.ablated:
        ways += [*ablations(), *fixed_strides()]
    entry = {
        "name": prompt.name,
        "retriever": prompt.setting,
        "passages": len(store),
        "ablated": prompt.ablated,
        "runs": time_ways(prompt.id, ways, prompt.runs, generate, bench.computes_exactly),
    }
    if prompt.ablated:
        queries = _queries(bench, prompt.ids, store)
        entry["search_seconds"] = time_searches(store, queries, prompt.k)
    yield entry


def _generate(
    bench: Bench,
    prompt_ids: list[int],
    store: KnnDatastore,
    k: int,
    sampled: bool,
    way: RetrievalWay,
    stats: RetrievalStats,
) -> tuple[list[int], Callable[[], Said]]:
    options = way.alone
    if options is None:
        options = {
            "custom_generate": knn_lm,
            "knn_datastore": store,
            "k": k,
            "lambda_": LAMBDA,
            "temperature": TEMPERATURE,
            "speculation": way.speculation,
            "retrieval_stats": stats,
        }
    torch.manual_seed(0)
    ids = bench.generate(prompt_ids, max_new_tokens=NEW_TOKENS, do_sample=sampled, **options)
    return ids, lambda: Said(ids)


def _queries(bench: Bench, ids: list[int], store: KnnDatastore) -> list[Any]:
    """Hidden states of tokens that follow each other."""
    with torch.no_grad(), recorded(bench.model, store.config.layer) as hidden:
        bench.model(torch.tensor([ids], device=bench.model.device))
    assert hidden.states is not None
    return list(hidden.states[0, -BATCHES[-1] :].float().numpy(force=True))
