"""A kNN-LM that goes on from where standard library files begin: its datastore as [`Searched`]."""

from __future__ import annotations

from functools import cached_property
from importlib.util import find_spec
from itertools import islice, product
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..demo import corpus
from ..ralm.knn_lm import knn_lm
from ..ralm.options import Speculation
from ..store.knn_datastore import KnnDatastore
from .measure import Bench
from .methods import Method, retrieving_methods
from .options import BenchOptions
from .retrieval import Searched

NEIGHBOURS = (1, 1024)
PROMPTS, PROMPT_TOKENS, LEAST_TOKENS = 10, 256, 384  # of files with at least so many
LAMBDA, TEMPERATURE = 0.25, 10.0
WITHOUT_PQ_INDEX = "ours, psa, without the PQ index"


class KnnStores(Searched):
    """A datastore, searched exactly and approximately, with few and many neighbours.

    Args:
        options ([`BenchOptions`]): Which.
        tokenizer (`PreTrainedTokenizerBase`): The language model's.

    Raises:
        OSError, ValueError: If it cannot be opened, is another tokenizer's, or is too small.
        ImportError: If FAISS is missing.
    """

    def __init__(self, options: BenchOptions, tokenizer: PreTrainedTokenizerBase) -> None:
        folder = options.knn_datastore
        if folder is None:
            raise ValueError(
                "knn looks up neighbours: name a datastore that KnnDatastore.build has made with "
                "the model, with --knn-datastore"
            )
        if options.replay:
            raise ValueError("knn needs the model's own text; run it without --replay")
        try:
            self._flat = KnnDatastore(folder)
            self._flat.check_tokenizer(tokenizer)
        except (OSError, ValueError) as error:
            raise ValueError(f"--knn-datastore {folder} cannot be used: {error}") from error
        if len(self._flat) < max(NEIGHBOURS):
            raise ValueError(
                f"--knn-datastore {folder} has {len(self._flat)} entries, fewer than the "
                f"{max(NEIGHBOURS)} neighbours that are looked up; build a larger one"
            )
        if find_spec("faiss") is None:
            raise ImportError("the suite needs faiss; install the extra `retrieval`")
        self._settings = {
            f"{index}, k={k}, {kind}": (index, k, kind == "sampled")
            for index, k, kind in product(("flat", "hnsw"), NEIGHBOURS, ("greedy", "sampled"))
        }
        self.settings = list(self._settings)

    def size(self, setting: str) -> int:
        """The entries of the datastore."""
        return len(self._flat)

    def samples(self, setting: str) -> bool:
        """Whether the model samples."""
        return self._settings[setting][2]

    def options(self, setting: str, bench: Bench) -> dict[str, Any]:
        """Of `knn_lm`."""
        return {
            "custom_generate": knn_lm,
            "knn_datastore": self._store(setting),
            "k": self._settings[setting][1],
            "lambda_": LAMBDA,
            "temperature": TEMPERATURE,
        }

    def methods(self, setting: str, bench: Bench) -> list[Method]:
        """Ours without the PQ index as well, where there is one."""
        methods = super().methods(setting, bench)
        if self._store(setting).pq_index is not None:
            without = {WITHOUT_PQ_INDEX: Speculation(pq_index=False)}
            methods += retrieving_methods(without, **self.options(setting, bench))
        return methods

    def _store(self, setting: str) -> KnnDatastore:
        return self._hnsw if self._settings[setting][0] == "hnsw" else self._flat

    @cached_property
    def _hnsw(self) -> KnnDatastore:
        """Its graph is made when it is first needed, which takes a while."""
        return KnnDatastore(self._flat.path, "hnsw")


def knn_prompts(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, list[int]]]:
    """Names and beginnings of files that are long enough, and that the bundled model has not
    seen."""
    root = corpus.library_root()
    tokenized = (
        (
            path.relative_to(root).as_posix(),
            tokenizer(corpus.read_source(path), verbose=False)["input_ids"],
        )
        for path in corpus.heldout_files()
    )
    long = ((name, ids[:PROMPT_TOKENS]) for name, ids in tokenized if len(ids) > LEAST_TOKENS)
    return list(islice(long, PROMPTS))
