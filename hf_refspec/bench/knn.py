"""A kNN-LM that goes on from where standard library files begin: its datastore as [`Searched`]."""

from __future__ import annotations

from functools import cached_property
from importlib.util import find_spec
from itertools import islice, product
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..demo import corpus
from ..ralm.engine import Speculation
from ..ralm.knn_lm import knn_lm
from ..store.knn_datastore import KnnDatastore
from .measure import Bench
from .methods import Method, ablations, main_speculations, retrieving_methods, strides
from .options import BenchOptions

NEIGHBOURS = (1, 1024)
PROMPTS, PROMPT_TOKENS, LEAST_TOKENS = 10, 256, 384  # of files with at least so many
LAMBDA, TEMPERATURE = 0.25, 10.0
WITHOUT_SKETCH = "ours, psa, without the sketch"


class KnnStores:
    """A datastore, searched exactly and approximately, with few and many neighbours.

    Args:
        options ([`BenchOptions`]): Which.
        tokenizer (`PreTrainedTokenizerBase`): The language model's.

    Raises:
        OSError, ValueError: If it cannot be opened, is another tokenizer's, or is too small.
        ImportError: If FAISS is missing.
    """

    longest_passage = 0

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

    @property
    def settings(self) -> list[str]:
        """Each index with each number of neighbours, greedy and sampled."""
        return list(self._settings)

    def size(self, setting: str) -> int:
        """The entries of the datastore."""
        return len(self._flat)

    def samples(self, setting: str) -> bool:
        """Whether the model samples."""
        return self._settings[setting][2]

    def methods(self, setting: str, bench: Bench) -> list[Method]:
        """The main ones, and ours without the PQ index, where there is one."""
        speculations = main_speculations()
        if self._store(setting).sketch is not None:
            speculations[WITHOUT_SKETCH] = Speculation(sketch=False)
        return retrieving_methods(speculations, **self._options(setting))

    def ablations(self, setting: str, bench: Bench) -> list[Method]:
        """Without some of the boosters, and with fixed strides."""
        return retrieving_methods({**ablations(), **strides()}, **self._options(setting))

    def _options(self, setting: str) -> dict[str, Any]:
        return {
            "custom_generate": knn_lm,
            "knn_datastore": self._store(setting),
            "k": self._settings[setting][1],
            "lambda_": LAMBDA,
            "temperature": TEMPERATURE,
        }

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
