"""Speculative retrieval against waiting for every search, as in RaLMSpec (arXiv 2401.14021).

    python benchmarks/retrieval.py ralm BASE --prompts FILE [--encoder ENCODER] ...
    python benchmarks/retrieval.py knn KNN [--prompts FILE] ...
    python benchmarks/retrieval.py latency BASE [--encoder ENCODER] ...

`ralm` answers questions with a knowledge base (iterative RaLM); `knn` continues texts, by default
files of the standard library, with a kNN datastore (kNN-LM). All methods answer each prompt by
turns, after one call that does not count. Ids and passages must be those of the baseline. Seconds
are those of generation (G) and of retrieval (R: queries, request cache, waiting), as in the paper's
Figure 4. `latency` prints the time of a search against the number of its queries, as in Figure 6.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from suites import ForcedText, RecordedAnswer, llma_rag, random_model, table
from transformers import BatchEncoding, LogitsProcessorList, PreTrainedTokenizerBase

from hf_refspec.apps.bench.prompts import read_chats, taking_turns
from hf_refspec.apps.cli.arguments import add_model, positive
from hf_refspec.apps.shared.comparison import Comparison, speedup
from hf_refspec.apps.shared.loading import load_model, load_tokenizer
from hf_refspec.apps.shared.prompts import chat_inputs
from hf_refspec.drafting.reference_copy import ReferenceCopy
from hf_refspec.ralm.iterative import iterative_ralm
from hf_refspec.ralm.knn_datastore import KnnDatastore
from hf_refspec.ralm.knn_lm import knn_lm
from hf_refspec.ralm.options import Speculation
from hf_refspec.ralm.stats import RetrievalStats
from hf_refspec.retrieval.bm25 import SparseRetriever
from hf_refspec.retrieval.dense import DenseRetriever
from hf_refspec.retrieval.flat import index_type
from hf_refspec.retrieval.knowledge_base import KnowledgeBase
from hf_refspec.retrieval.retriever import Retriever
from hf_refspec.retrieval.text_encoder import load_encoder
from hf_refspec.retrieval.vector_index import LEAST_WALKED, squared_lengths
from hf_refspec.store.build.presets import python_stdlib

GENERATION_STRIDE, QUERY_LENGTH = 4, 32  # of the paper, section 5.1
# Retrieval that waits for every search, RaLMSpec with its three boosters, and ours.
BASELINE, PUBLISHED, OURS = "baseline", "as published, psa", "ours, psa"
LARGE_PREFETCH = 256
NEIGHBOURS, SWEPT = (1, 1024), (1, 4, 16, 64, 256, 1024)
PROMPT_TOKENS, LEAST_TOKENS = 256, 384  # of a text that is continued
EVERY = 10  # every tenth file of the library is continued; the others are for the datastore
LAMBDA, TEMPERATURE = 0.25, 10.0
BATCHES, REPETITIONS = (1, 2, 4, 8, 16, 32), 5


class PaddedKnowledgeBase(KnowledgeBase):
    """A knowledge base with random embeddings added, so that exact searches take longer.

    In hundreds of dimensions random directions are nearly orthogonal to every query, so that
    searches compare them with it but hardly ever return them.
    """

    def __init__(self, path: Any, tokenizer: PreTrainedTokenizerBase, distractors: int) -> None:
        super().__init__(path, tokenizer)
        assert self.embeddings is not None
        count, dimension = self.embeddings.shape
        padded = np.empty((count + distractors, dimension), dtype=np.float32)
        padded[:count] = self.embeddings
        np.random.default_rng(0).standard_normal(dtype=np.float32, out=padded[count:])
        squares = np.einsum("ij,ij->i", padded[count:], padded[count:])  # without a copy of all
        padded[count:] /= np.sqrt(squares)[:, None]
        self.embeddings = padded

    def __len__(self) -> int:
        assert self.embeddings is not None
        return len(self.embeddings)

    def passage(self, passage_id: int) -> np.ndarray:
        """The tokens of a passage, and for a distractor the first tokens of passage 0."""
        if self.config.passages <= passage_id < len(self):
            return super().passage(0)[:4]
        return super().passage(passage_id)


class PaddedKnnDatastore(KnnDatastore):
    """A kNN datastore with entries added, so that searches take as long as in a large one.

    Each added entry lies between an entry of the datastore and one of its 16 nearest, closer to the
    former, and has its next token. They repeat the datastore's order, so that the next entries of a
    text follow each other in them as well.
    """

    def __init__(self, path: Path, added: int) -> None:
        super().__init__(path)
        count, keys, rng = len(self.keys), self.keys, np.random.default_rng(0)
        near = np.stack([found.ids[1:] for found in self.search(list(keys), 17)])
        self.keys = np.resize(keys, (count + added, keys.shape[1]))  # in repeated copies
        self.values = np.resize(self.values, len(self.keys))
        for begin in range(count, len(self.keys), count):
            copies = self.keys[begin : begin + count]
            others = keys[near[np.arange(len(copies)), rng.integers(0, 16, len(copies))]]
            copies += rng.uniform(0, 0.5, (len(copies), 1)).astype(np.float32) * (others - copies)
        self._index = index_type("flat")(self.keys, squared_lengths(self.keys), "l2")

    def __len__(self) -> int:
        return len(self.keys)


def speculations(ablate: bool, boosters: str) -> dict[str, Speculation | None]:
    """The settings of speculation by name: the baseline, RaLMSpec with its boosters, and ours; with
    `ablate` each of the boosters, larger prefetching and fixed strides (its Tables 1, 2 and 4)."""
    published = {f"as published, {boosters}": Speculation.published(boosters)}
    if ablate:
        letters = ("", "p", "s", "a", "ps", "pa", "sa") if boosters == "psa" else ("",)
        published |= {
            f"as published, {each or 'none'}": Speculation.published(each) for each in letters
        }
        for each in ("p", "psa") if boosters == "psa" else ():
            large = replace(Speculation.published(each), prefetch=LARGE_PREFETCH)
            published[f"as published, {each}, prefetch {LARGE_PREFETCH}"] = large
        for stride in (1, 3, 5, 8):
            fixed = replace(Speculation.published(boosters), stride=stride)
            published[f"as published, {boosters}, stride {stride}"] = fixed
    return {BASELINE: None, **published, OURS: Speculation()}


def retrievers(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Callable[[], Retriever]]:
    """BM25 and, with an encoder, exact and approximate dense retrieval over a knowledge base."""
    base = KnowledgeBase.from_pretrained(args.base, tokenizer)
    found: dict[str, Callable[[], Retriever]] = {}
    if args.encoder is not None:
        encoder = load_encoder(args.encoder)
        searched = base
        if args.distractors:
            searched = PaddedKnowledgeBase(base.path, tokenizer, args.distractors)
        # With --ablate, a graph walks the largest number for the baseline too.
        walked = LARGE_PREFETCH if args.ablate else LEAST_WALKED
        found[f"flat, {len(searched):,}"] = partial(DenseRetriever, searched, encoder)
        found[f"hnsw, {len(base):,}"] = partial(DenseRetriever, base, encoder, "hnsw", walked)
    elif args.distractors:
        raise ValueError("--distractors needs --encoder, for the embeddings")
    found[f"bm25, {len(base):,}"] = partial(SparseRetriever, base, progress=False)
    return found


def compare(
    model: Any,
    prompts: list[RecordedAnswer],
    settings: dict[str, Speculation | None],
    new_tokens: int,
    forced: bool = False,
    **options: Any,
) -> list[list[Any]]:
    """A row for each setting. `options` are for `generate`; with `forced` the model has to write
    the recorded answers."""
    stats = {name: RetrievalStats() for name in settings}

    def methods() -> dict[str, dict[str, Any]]:
        return {
            name: {"speculation": each, "retrieval_stats": stats[name]}
            for name, each in settings.items()
        }

    comparison = Comparison(model, methods, **options)
    comparison.warm_up()
    figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in settings}
    for prompt in prompts:
        ids = torch.tensor([prompt.prompt_ids])
        inputs = BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        given: dict[str, Any] = {"max_new_tokens": new_tokens}
        if forced:
            text = ForcedText(torch.tensor(prompt.prompt_ids + prompt.answer_ids))
            given = {"max_new_tokens": len(prompt.answer_ids), "eos_token_id": None}
            given["logits_processor"] = LogitsProcessorList([text])
        comparison.ask(inputs.to(model.device), **given)
        for name, each in stats.items():
            if each.best_ids != stats[BASELINE].best_ids:
                raise SystemExit(f"{name} retrieved other passages than the baseline")
            seconds = each.waiting_seconds + each.cache_seconds
            if options["custom_generate"] is not knn_lm:  # whose queries generation computes
                seconds += each.query_seconds
            figures[name].append((each.searches, each.gamma, seconds))
    if model.dtype == torch.float32 and any(
        comparison.equal(name) < len(prompts) for name in settings
    ):
        raise SystemExit("a method gave other ids than the baseline")
    rows = []
    for name, calls in comparison.calls.items():
        searches, gamma, seconds = (fmean(each) for each in zip(*figures[name], strict=True))
        whole = fmean(call.seconds for call in calls)
        faster = speedup(comparison.calls[BASELINE], calls)
        cells = f"{searches:.1f}", f"{gamma:.2f}", f"{whole - seconds:.3g}", f"{seconds:.3g}"
        rows.append([name, *cells, f"{faster:.2f}x"])
        print(*rows[-1], flush=True)
    return rows


def _ralm(args: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(args.model)
    if args.forced:
        model = random_model("tiny", len(tokenizer))
        prompts = llma_rag(args.prompts, tokenizer, passages=False)[: args.limit]
    else:
        model = load_model(args.model, args.device_map, args.dtype)
        chats = taking_turns(read_chats(args.prompts))[: args.limit]
        ids = [chat_inputs(tokenizer, chat.until(0, []))["input_ids"] for chat in chats]
        prompts = [RecordedAnswer(each[0].tolist(), []) for each in ids]
    options = {
        "custom_generate": iterative_ralm,
        "tokenizer": tokenizer,
        "generation_stride": GENERATION_STRIDE,
        "query_length": QUERY_LENGTH,
    }
    if args.drafts:
        options["drafter"] = ReferenceCopy()
    settings = speculations(args.ablate, "psa")
    for name, new_retriever in retrievers(args, tokenizer).items():
        retriever = new_retriever()
        rows = compare(
            *(model, prompts, settings, args.max_new_tokens, args.forced),
            retriever=retriever,
            do_sample=False,
            **options,
        )
        print(table([name, "searches", "gamma", "G, s", "R, s", "speed-up"], rows))


def _knn(args: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(args.model)
    flat = KnnDatastore(args.base)
    flat.check_tokenizer(tokenizer)
    texts = islice(_texts(args.prompts), 50 * args.limit)
    ids = (tokenizer(text, verbose=False)["input_ids"] for text in texts)
    long = (RecordedAnswer(each[:PROMPT_TOKENS], []) for each in ids if len(each) > LEAST_TOKENS)
    prompts = list(islice(long, args.limit))
    model = load_model(args.model, args.device_map, args.dtype)
    padded = PaddedKnnDatastore(flat.path, args.distractors) if args.distractors else flat
    for index, store in (("flat", padded), ("hnsw", KnnDatastore(args.base, "hnsw"))):
        for k in SWEPT if args.ablate else NEIGHBOURS:
            for sampled in (False,) if args.ablate else (False, True):
                rows = compare(
                    *(model, prompts, speculations(args.ablate, "s"), args.max_new_tokens),
                    custom_generate=knn_lm,
                    knn_datastore=store,
                    k=min(k, len(flat)),
                    lambda_=LAMBDA,
                    temperature=TEMPERATURE,
                    do_sample=sampled,
                )
                name = f"{index}, {len(store):,}, k={k}, {'sampled' if sampled else 'greedy'}"
                print(table([name, "searches", "gamma", "G, s", "R, s", "speed-up"], rows))


def _texts(prompts: Path | None) -> Iterator[str]:
    """The texts that are continued: first turns of a file, or files of the standard library."""
    if prompts is not None:
        yield from (chat.turns[0] for chat in read_chats(prompts))
        return
    for path in python_stdlib()[::EVERY]:
        yield path.read_text(encoding="utf-8", errors="replace")


def _latency(args: argparse.Namespace) -> None:
    rows, tokenizer = [], load_tokenizer(args.model)
    passages = KnowledgeBase.from_pretrained(args.base, tokenizer).config.passages
    drawn = np.random.default_rng(0).integers(passages, size=BATCHES[-1])
    for name, new_retriever in retrievers(args, tokenizer).items():
        retriever = new_retriever()
        queries = [retriever.encode(retriever.passage(i)[:QUERY_LENGTH]) for i in drawn.tolist()]
        retriever.search(queries, args.k)  # the first one compiles and loads
        medians = []
        for batch in BATCHES:
            seconds = []
            for _ in range(REPETITIONS):
                began = perf_counter()
                retriever.search(queries[:batch], args.k)
                seconds.append(perf_counter() - began)
            medians.append(f"{1e3 * median(seconds):.1f}")
        rows.append([name, *medians])
    print(table(["ms, queries:", *BATCHES], rows))


def main(arguments: list[str] | None = None) -> int:
    """Runs one of the three."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("measured", choices=("ralm", "knn", "latency"))
    add("base", type=Path, help="a knowledge base, or a kNN datastore that the model built")
    add_model(parser)
    add("--prompts", type=Path, metavar="FILE", help="as `hf-refspec bench` has them")
    add("--limit", type=positive, default=3, metavar="N", help="only the first N; 3 by default")
    add("--max-new-tokens", type=positive, default=48, metavar="N")
    add("--encoder", help="the sentence-transformers model that embedded the knowledge base")
    add(
        "--distractors",
        type=positive,
        default=0,
        metavar="N",
        help="add N vectors: random ones, or of a kNN datastore near ones",
    )
    add("--ablate", action="store_true", help="measure every setting of speculation")
    add("--drafts", action="store_true", help="ralm: with drafts of ReferenceCopy as well")
    add(
        "--forced",
        action="store_true",
        help="ralm: --prompts is llma_rag.jsonl, whose answers a "
        "tiny random model is made to write",
    )
    add("--k", type=positive, default=1, help="latency: passages for each query")
    args = parser.parse_args(arguments)
    if args.measured == "ralm" and args.prompts is None:
        parser.error("ralm needs --prompts")
    {"ralm": _ralm, "knn": _knn, "latency": _latency}[args.measured](args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
