"""Speculative retrieval against waiting for every search, as in RaLMSpec (arXiv 2401.14021).

    python benchmarks/retrieval.py build FOLDER --data DATA
    python benchmarks/retrieval.py ralm FOLDER --data DATA --out FILE ...
    python benchmarks/retrieval.py knn FOLDER --out FILE ...
    python benchmarks/retrieval.py latency FOLDER --data DATA

`build` makes what the others search: `base` and `vectors.npy` for dense retrieval, `sparse` for
BM25, `knn` for the kNN-LM. `ralm` answers questions (iterative RaLM), `knn` continues files of the
standard library. Methods answer each prompt by turns, after a short call that does not count; ids
and passages must be the baseline's. Every call is a line of `--out`; another start goes on from
there. Seconds are those of generation (G) and of retrieval (R: queries, request cache, waiting), as
in the paper's Figure 4. `latency` has the time of a search by the number of its queries (Figure 6).
With `--search-seconds` searches take that long and no CPU, as those of a remote vector database.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain, islice, product
from pathlib import Path
from statistics import fmean, median, stdev
from time import perf_counter, sleep
from timeit import repeat
from typing import Any, TypeAlias

import numpy as np
import torch
from corpora import python_stdlib
from suites import chat_ids, json_lines, table
from transformers import BatchEncoding, PreTrainedTokenizerBase

from hf_refspec.apps.cli.arguments import add_model, positive
from hf_refspec.apps.shared.comparison import decode
from hf_refspec.apps.shared.loading import load_model, load_tokenizer
from hf_refspec.apps.shared.prompts import user
from hf_refspec.drafting.reference_copy import ReferenceCopy
from hf_refspec.ralm.iterative import PassageEntries, iterative_ralm
from hf_refspec.ralm.knn_datastore import KnnDatastore
from hf_refspec.ralm.knn_lm import knn_lm
from hf_refspec.ralm.options import RalmSpeculation
from hf_refspec.ralm.run import LEARNED
from hf_refspec.ralm.stats import RalmStats
from hf_refspec.retrieval.bm25 import SparseRetriever
from hf_refspec.retrieval.dense import DenseRetriever
from hf_refspec.retrieval.knowledge_base import KnowledgeBase, TextEncoder, load_encoder
from hf_refspec.retrieval.retriever import Retriever
from hf_refspec.retrieval.vector_index import Index, index_type, squared_lengths
from hf_refspec.verification.model_memo import memo_of
from hf_refspec.warm_up import warmup

GENERATION_STRIDE = 4  # of the paper, section 5.1
QUERY_LENGTH = 32  # of its authors' code
# R:G of the baseline on Wiki QA, in the authors' scripts: exact, HNSW, BM25.
RATIOS = {"llama-exact": 19.7, "llama-hnsw": 0.12, "llama-bm25": 0.80}
RATIOS |= {"gpt2-exact": 41.4, "gpt2-hnsw": 0.24, "gpt2-bm25": 2.1, "equal": 1.0}
BASELINE = "B"
OURS = "ours"
DRAFTS = "ours+drafts"
EMPTY = "ours, empty cache"
LARGE = 256
WARM_UP_TOKENS = 8
_published = RalmSpeculation.published
# The paper's letters; its Table 5 has strides alone, of which 3 is RaLMSpec without any letter.
METHODS: dict[str, RalmSpeculation | None] = {BASELINE: None}
METHODS |= {name: _published(name.lower()) for name in ("P", "S", "A", "PS", "PA", "SA", "PSA")}
METHODS |= {f"{n}256": replace(_published(n.lower()), prefetch=LARGE) for n in ("P", "PSA")}
METHODS |= {f"s={n}": replace(_published(""), stride=n) for n in range(1, 9)}
METHODS |= {OURS: RalmSpeculation(), DRAFTS: RalmSpeculation(), EMPTY: RalmSpeculation()}
DIMENSION = 768  # of vectors that `--encoder` names
CHUNK_LENGTH = 256
COMMON = 1e-3  # frequency of a token that weighs half as much as a rare one
FILES = 100  # that are embedded
ENTRIES = 20_000  # of the kNN datastore
NEAR = 16  # neighbours that the entries of a kNN-LM are drawn towards
PROMPT_TOKENS = 256  # of a text that is continued
LEAST_TOKENS = 384  # of the text itself
EVERY = 10  # every tenth file of the library is continued; the others are for the datastore
LAMBDA = 0.25
TEMPERATURE = 10.0
CONCURRENT_SEARCHES = 8  # of a remote retriever, see `remote`
TURNS_APART = 4  # every fourth conversation: several categories
OTHER_WORDS = "I would like to know more about this: {}? Please explain."
BATCHES = 1, 2, 4, 8, 16, 32
REPETITIONS = 5
FIGURES = "searches", "gamma", "seconds", "retrieval", "first"  # recorded of each call


def fill_near(rows: np.ndarray, own: np.ndarray, passages: bool) -> None:
    """Fills `rows` with `own`, then with others, in the order of `own`: each lies between one of
    these and another, closer to the former. For states of a kNN-LM that is one of its nearest; for
    `passages`, whose vectors have length 1, it is any, since passages are seldom nearly alike."""
    count, rng = min(len(own), len(rows)), np.random.default_rng(0)
    first = rows[:count] = own[:count]
    others = np.arange(count)
    if not passages:
        index = index_type("flat")(first, squared_lengths(first), "l2")
        others = np.stack([found.ids[1:] for found in index.search(first, min(NEAR + 1, count))])
    for begin in range(count, len(rows), count):
        part = rows[begin : begin + count]
        part[:] = first[: len(part)]
        drawn = rng.integers(0, others.shape[-1], len(part))
        other = drawn if passages else others[np.arange(len(part)), drawn]
        part += rng.uniform(0, 0.5, (len(part), 1)).astype(np.float32) * (first[other] - part)
        if passages:
            part /= np.linalg.norm(part, axis=1, keepdims=True)


class NearKnowledgeBase(KnowledgeBase):
    """A knowledge base with vectors near its own, of a file that is memory-mapped. They stand for
    passages that overlap its own: windows of its tokens that begin later."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, vectors: int) -> None:
        super().__init__(folder / "base", tokenizer)
        self.embeddings = np.load(folder / "vectors.npy", mmap_mode="c")[:vectors]

    def __len__(self) -> int:
        assert self.embeddings is not None
        return len(self.embeddings)

    def passage(self, passage_id: int) -> np.ndarray:
        copied, own = divmod(passage_id, self.config.passages)
        if copied == 0:
            return super().passage(own)
        last = self.config.tokens - CHUNK_LENGTH
        begin = min(int(self._bounds[own]) + copied % CHUNK_LENGTH, last)
        return self._tokens[begin : begin + CHUNK_LENGTH].astype(np.int64)


class NearKnnDatastore(KnnDatastore):
    """A kNN datastore with entries near its own, each with the next token of the entry it is
    closest to, so that searches take as long as in a large one."""

    def __init__(self, path: Path, entries: int, index: Index) -> None:
        super().__init__(path)
        own, self.index = self.keys, index
        self.keys = np.empty((entries, own.shape[1]), np.float32)
        fill_near(self.keys, own, passages=False)
        self.values = np.resize(self.values, entries)
        self._index = index_type(index)(self.keys, squared_lengths(self.keys), "l2")

    def __len__(self) -> int:
        return len(self.keys)


def wide_encoder(name: str) -> Callable[[list[str]], np.ndarray]:
    """An encoder, its vectors repeated up to 768 numbers, with the same inner products."""
    encoder = TextEncoder(load_encoder(name))

    def encode(texts: list[str]) -> np.ndarray:
        vectors = encoder.passages(texts)
        repeats = max(DIMENSION // vectors.shape[1], 1)
        return np.tile(vectors, repeats) / np.float32(repeats**0.5)

    return encode


def token_encoder(args: argparse.Namespace) -> Callable[[list[str]], np.ndarray]:
    """The mean of the model's token embeddings, where common tokens weigh less: smooth inverse
    frequency (Arora et al. 2017), without the direction that most of them share."""
    tokenizer = load_tokenizer(args.model)
    model = load_model(args.model, "cpu", torch.float32)
    tokens = model.get_input_embeddings().weight.detach().numpy()
    docs = [doc for row in json_lines(args.data / "llma_rag.jsonl") for doc in row["docs"]]
    ids = np.concatenate(tokenizer(docs, add_special_tokens=False)["input_ids"])
    frequency = (np.bincount(ids, minlength=len(tokens)) + 0.5) / len(ids)
    tokens = tokens - frequency @ tokens / frequency.sum()
    tokens /= np.linalg.norm(tokens, axis=1, keepdims=True)
    tokens *= COMMON / (COMMON + frequency[:, None])
    tokens -= tokens.mean(axis=0)
    shared = np.linalg.eigh(tokens.T @ tokens)[1][:, -1:]
    tokens = (tokens - tokens @ shared @ shared.T).astype(np.float32)

    def encode(texts: list[str]) -> np.ndarray:
        rows = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        vectors = np.stack([tokens[row].sum(axis=0) for row in rows])
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.maximum(lengths, np.finfo(np.float32).tiny)

    return encode


def chosen_encoder(args: argparse.Namespace) -> Callable[[list[str]], np.ndarray]:
    """That of `--encoder`, or else `token_encoder`."""
    return wide_encoder(args.encoder) if args.encoder else token_encoder(args)


def python_files() -> list[Path]:
    """The sources of the standard library and of all installed packages."""
    return [*python_stdlib(), *sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))]


def _texts(files: list[Path]) -> Iterator[str]:
    return (file.read_text(encoding="utf-8", errors="replace") for file in files)


def _build(args: argparse.Namespace) -> None:
    """Builds what is not there yet."""
    tokenizer, folder, files = load_tokenizer(args.model), args.folder, python_files()
    docs = [doc for row in json_lines(args.data / "llma_rag.jsonl") for doc in row["docs"]]
    folder.mkdir(parents=True, exist_ok=True)
    build = partial(KnowledgeBase.build, chunk_length=CHUNK_LENGTH)
    if not (folder / "base").exists():
        texts = chain(docs, _texts(files[:: len(files) // FILES + 1]))
        build(texts, tokenizer, chosen_encoder(args), folder / "base")
    if not (folder / "vectors.npy").exists():
        own = KnowledgeBase(folder / "base", tokenizer).embeddings
        assert own is not None
        shape = max(len(own), *args.vectors), own.shape[1]
        rows = np.lib.format.open_memmap(folder / "unfinished.npy", "w+", np.float32, shape)
        fill_near(rows, own, passages=True)
        rows.flush()
        os.replace(folder / "unfinished.npy", folder / "vectors.npy")
    if not (folder / "sparse").exists():
        build(chain(docs, _texts(files)), tokenizer, None, folder / "sparse")
    if not (folder / "knn").exists():
        model = load_model(args.model, args.device_map, args.dtype)
        some = _texts([file for i, file in enumerate(python_stdlib()) if i % EVERY])
        KnnDatastore.build(some, tokenizer, model, folder / "knn", max_entries=ENTRIES)


def as_long_as(retriever: Any, times: int) -> Retriever:
    """The retriever, each of whose searches is made several times."""
    search = retriever.search
    vars(retriever)["search"] = lambda *args: [search(*args) for _ in range(max(times, 1))][-1]
    return retriever


def remote(retriever: Any, seconds: float) -> Any:
    """The retriever, with searches that take so many seconds and, but for the real one, no CPU."""

    class Remote(type(retriever)):  # type: ignore[misc]
        search_threads = 0
        concurrent_searches = CONCURRENT_SEARCHES

        def search(self, queries: Any, k: int) -> Any:
            began = perf_counter()
            found = super().search(queries, k)
            sleep(max(seconds - (perf_counter() - began), 0.0))
            return found

    copied = object.__new__(Remote)
    vars(copied).update(vars(retriever))
    vars(copied).pop("search", None)  # of `as_long_as`
    return copied


def seconds_or_ratio(text: str) -> float | str:
    """Reads `--search-seconds`."""
    if text in RATIOS:
        return text
    if not 0 < float(text) < float("inf"):
        raise ValueError("a search takes more than 0 seconds")
    return float(text)


def retrievers(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Callable[[], Retriever]]:
    """The retrievers that were asked for, by name, not opened yet."""
    found: dict[str, Callable[[], Retriever]] = {}
    encoder = chosen_encoder(args) if {"flat", "hnsw"} & set(args.index) else None

    def dense(index: Index, vectors: int) -> Retriever:
        base = NearKnowledgeBase(args.folder, tokenizer, vectors)
        # A graph walks the largest number for the baseline too.
        retriever = DenseRetriever(base, encoder, index, LARGE)
        return as_long_as(retriever, round(vectors / len(base)))

    def sparse(base: KnowledgeBase, passages: int) -> Retriever:
        return as_long_as(SparseRetriever(base, progress=False), round(passages / len(base)))

    for vectors in args.vectors if "flat" in args.index else ():
        found[f"flat, {vectors:,}"] = partial(dense, "flat", vectors)
    if "hnsw" in args.index:
        found[f"hnsw, {args.graph:,}"] = partial(dense, "hnsw", args.graph)
    if "bm25" in args.index:
        base = KnowledgeBase.from_pretrained(args.folder / "sparse", tokenizer)
        for passages in args.passages or [len(base)]:
            found[f"bm25, {passages:,}"] = partial(sparse, base, passages)
    return found


class Calls:
    """The calls of all methods, by setting, method, seed and prompt: lines of a file that another
    start goes on with."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._file, self._new_tokens = args.out, args.max_new_tokens
        self._made: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._methods = [BASELINE, *(name for name in args.methods if name != BASELINE)]
        self._seeds, self._prompts = range(args.seeds or 1), range(args.limit)
        self._sampled = {"do_sample": args.seeds is not None}
        self._parts = [("", slice(None))]
        if args.pairs:
            self._parts = [(f", {args.pairs} {i + 1}", slice(i, None, 2)) for i in range(2)]
        if args.out.exists():
            self._made = {tuple(call.pop("key")): call for call in json_lines(args.out)}

    def missing(self, setting: str) -> set[str]:
        """The methods that lack a call."""
        keys = product([setting], self._methods, self._seeds, self._prompts)
        return {key[1] for key in keys if key not in self._made}

    def measure(
        self, setting: str, model: Any, prompts: list[list[int]], retriever: Any, options: Any
    ) -> None:
        """Makes the calls that are missing. `options` are for `generate`."""
        call = {}
        for method in self._methods:  # each learns from a retriever of its own
            copied = object.__new__(type(retriever))
            vars(copied).update(vars(retriever))
            call[method] = partial(_call, model, method, copied)
        options = options | self._sampled
        warmup()
        for method in self.missing(setting):
            call[method](prompts[0], 0, {**options, "max_new_tokens": WARM_UP_TOKENS})
        options["max_new_tokens"] = self._new_tokens
        for seed, prompt in product(self._seeds, self._prompts):
            for method in random.Random(prompt).sample(self._methods, len(self._methods)):
                key = setting, method, seed, prompt
                if key not in self._made:
                    self._made[key] = call[method](prompts[prompt], seed, options)
                    print(*key, f"{self._made[key]['seconds']:.1f} s", flush=True)
                    with self._file.open("a") as file:
                        file.write(json.dumps({"key": key, **self._made[key]}) + "\n")

    def table(self, setting: str) -> str:
        """A row for each method: means of a call, and the speed-up, with its deviation if there are
        several seeds. Refuses other texts or passages than the baseline's. Of pairs, a table of the
        first questions and one of the second."""
        figures = {}
        for method in self._methods:
            calls = np.empty((len(self._seeds), len(self._prompts), len(FIGURES)))
            for seed, prompt in product(self._seeds, self._prompts):
                made = self._made[setting, method, seed, prompt]
                truth = self._made[setting, BASELINE, seed, prompt]
                for what in ("ids", "passages"):
                    if made[what] != truth[what]:
                        raise SystemExit(f"{method} has other {what} than the baseline: {setting}")
                calls[seed, prompt] = [made[name] for name in FIGURES]
            figures[method] = calls
        return "\n\n".join(
            self._table(f"{setting}{which}", {m: all_[:, part] for m, all_ in figures.items()})
            for which, part in self._parts
        )

    def _table(self, setting: str, figures: dict[str, np.ndarray]) -> str:
        rows = []
        for method, calls in figures.items():
            searches, gamma, whole, retrieval, first = calls.mean(axis=(0, 1))
            by_seed = calls[..., 2].mean(axis=1)
            gains = (figures[BASELINE][..., 2].mean(axis=1) / by_seed).tolist()
            spread = f" ± {stdev(gains):.2f}" if len(gains) > 1 else ""
            model = whole - retrieval
            cells = f"{searches:.1f}", f"{first:.2f}", f"{gamma:.2f}", f"{model:.3g}"
            ratio, gain = f"{retrieval / model:.2f}", f"{fmean(gains):.2f}x{spread}"
            rows.append([method, *cells, f"{retrieval:.3g}", ratio, gain])
        columns = "searches", "first guessed", "gamma", "G, s", "R, s", "R:G", "speed-up"
        return table([setting, *columns], rows)


def _call(
    model: Any, method: str, retriever: Any, prompt: list[int], seed: int, options: Any
) -> dict[str, Any]:
    """One call of a method, as it is recorded."""
    stats = RalmStats()
    ids = torch.tensor([prompt], device=model.device)
    options = {**options, "speculation": METHODS[method], "ralm_stats": stats}
    options["knn_datastore" if options["custom_generate"] is knn_lm else "retriever"] = retriever
    if method == DRAFTS:
        options["drafter"] = ReferenceCopy()
    learned = vars(retriever).get(LEARNED, {}) if method == EMPTY else {}
    for setting, (scheduler, ids_kept) in learned.items():
        learned[setting] = scheduler, ids_kept[:0]
    memo_of(model).pop(PassageEntries, None)  # no method finds passages that another has read
    torch.manual_seed(seed)
    inputs = BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    decoded = decode(model, inputs, **options)
    retrieval = stats.waiting_seconds + stats.cache_seconds
    if options["custom_generate"] is not knn_lm:  # whose queries generation computes
        retrieval += stats.query_seconds
    first = float(stats.speculation_was_right[0])
    figures = stats.searches, stats.gamma, decoded.seconds, retrieval, first
    made = dict(zip(FIGURES, figures, strict=True))
    return {"ids": decoded.ids, "passages": stats.best_ids, **made}


# A setting: its name, how to open its retriever, and the options of `generate`.
Settings: TypeAlias = Iterator[tuple[str, Callable[[], Any], dict[str, Any]]]


def _of_ralm(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Settings:
    options: dict[str, Any] = {"custom_generate": iterative_ralm, "tokenizer": tokenizer}
    options |= {"generation_stride": GENERATION_STRIDE, "query_length": QUERY_LENGTH}
    for name, new_retriever in retrievers(args, tokenizer).items():
        yield name, new_retriever, options


def _of_knn(args: argparse.Namespace, _: PreTrainedTokenizerBase) -> Settings:
    @lru_cache(1)
    def store(index: Index, entries: int) -> KnnDatastore:
        return NearKnnDatastore(args.folder / "knn", entries, index)

    sizes: list[tuple[Index, int]] = [("flat", vectors) for vectors in args.vectors]
    for (index, entries), k in product([*sizes, ("hnsw", args.graph)], args.k):
        if index in args.index:
            options = {"k": k, "lambda_": LAMBDA, "temperature": TEMPERATURE}
            name = f"kNN-LM, {index}, {entries:,}, k={k}"
            yield name, partial(store, index, entries), {"custom_generate": knn_lm, **options}


def _pairs(args: argparse.Namespace, model: Any, tokenizer: Any) -> Iterator[list[int]]:
    """Questions of which each second one follows the one before it, others have nothing to do with
    that."""
    if args.pairs == "turns":
        rows = json_lines(args.data / "spec_bench_questions.jsonl")
        for first, second in (
            row["turns"] for row in rows[::TURNS_APART] if len(row["turns"]) == 2
        ):
            prompt = chat_ids([user(first)], tokenizer)
            ids = torch.tensor([prompt], device=model.device)
            output = model.generate(ids, max_new_tokens=args.max_new_tokens, do_sample=False)
            answer = tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True)
            told = {"role": "assistant", "content": answer}
            yield from (prompt, chat_ids([user(first), told, user(second)], tokenizer))
    else:
        for row in json_lines(args.data / "llma_rag.jsonl"):
            again = row["query"] if args.pairs == "same" else OTHER_WORDS.format(row["query"])
            yield from (chat_ids([user(text)], tokenizer) for text in (row["query"], again))


def _measure(args: argparse.Namespace) -> None:
    tokenizer, calls = load_tokenizer(args.model), Calls(args)
    model = load_model(args.model, args.device_map, args.dtype)
    if args.pairs:
        prompts = list(islice(_pairs(args, model, tokenizer), args.limit))
    elif args.measured == "ralm":
        asked = [row["query"] for row in json_lines(args.data / "llma_rag.jsonl")[: args.limit]]
        prompts = [chat_ids([user(query)], tokenizer) for query in asked]
    else:
        texts = _texts(python_stdlib()[::EVERY])
        ids = (tokenizer(text, verbose=False)["input_ids"] for text in texts)
        long = (text_ids[:PROMPT_TOKENS] for text_ids in ids if len(text_ids) > LEAST_TOKENS)
        prompts = list(islice(long, args.limit))
    settings = _of_ralm if args.measured == "ralm" else _of_knn
    how = "greedy" if args.seeds is None else "sampled"
    if args.pairs:
        how = f"{how}, {args.pairs}"
    searches = [None] if args.search_seconds is None else args.search_seconds or list(RATIOS)
    for (name, new_retriever, options), search in product(settings(args, tokenizer), searches):
        if search is not None:
            ratio = f"R:G {RATIOS[search]}" if isinstance(search, str) else "s"
            name = f"{name}, {search} {ratio}"
        setting = f"{name}, {args.max_new_tokens} tokens, {how}"
        if calls.missing(setting):
            retriever = new_retriever()
            if search is not None:
                length = args.max_new_tokens
                seconds = _search_seconds(search, model, retriever, prompts[0], options, length)
                retriever = remote(retriever, seconds)
            calls.measure(setting, model, prompts, retriever, options)
        print(calls.table(setting), flush=True)


def _search_seconds(
    search: str | float,
    model: Any,
    retriever: Any,
    prompt: list[int],
    options: dict[str, Any],
    new_tokens: int,
) -> float:
    """The seconds of a search; of a ratio, in steps of the baseline's first answer."""
    if isinstance(search, float):
        return search
    for tokens in (WARM_UP_TOKENS, new_tokens):  # the first call compiles and loads
        own = {**options, "max_new_tokens": tokens, "do_sample": False}
        call = _call(model, BASELINE, retriever, prompt, 0, own)
    return RATIOS[search] * (call["seconds"] - call["retrieval"]) / call["searches"]


def _latency(args: argparse.Namespace) -> None:
    rows, tokenizer = [], load_tokenizer(args.model)
    passages = KnowledgeBase.from_pretrained(args.folder / "base", tokenizer).config.passages
    least = min(passages, args.graph, *args.vectors)
    drawn = np.random.default_rng(0).integers(least, size=BATCHES[-1])
    for name, new_retriever in retrievers(args, tokenizer).items():
        retriever = new_retriever()
        queries = [retriever.encode(retriever.passage(i)[:QUERY_LENGTH]) for i in drawn.tolist()]
        retriever.search(queries, 1)  # the first one compiles and loads
        medians = []
        for batch in BATCHES:
            search = partial(retriever.search, queries[:batch], 1)
            seconds = repeat(search, number=1, repeat=REPETITIONS)
            medians.append(f"{1e3 * median(seconds):.1f}")
        rows.append([name, *medians])
    print(table(["ms, queries:", *BATCHES], rows))


def main(arguments: list[str] | None = None) -> int:
    """Builds, or measures one of the three."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    commands = {"build": _build, "ralm": _measure, "knn": _measure, "latency": _latency}
    add("measured", choices=tuple(commands))
    add("folder", type=Path, help="what `build` made")
    add_model(parser)
    add("--data", type=Path, help="the folder with llma_rag.jsonl")
    named = "a sentence-transformers model; by default the model's token embeddings"
    add("--encoder", metavar="NAME", help=named)
    add("--index", nargs="+", choices=("flat", "hnsw", "bm25"), default=("flat", "hnsw", "bm25"))
    more = "searched exactly; for more than `build` made, searches are made several times"
    add("--vectors", nargs="+", type=positive, default=[3_000_000], metavar="N", help=more)
    add("--passages", nargs="+", type=positive, metavar="N", help="of BM25; more as of --vectors")
    add("--graph", type=positive, default=300_000, metavar="N", help="vectors of an HNSW graph")
    beside = f"beside the baseline: {', '.join(METHODS)}"
    remote_ones = f"searches of S seconds without CPU; or, by default all of, {', '.join(RATIOS)}"
    add("--search-seconds", nargs="*", type=seconds_or_ratio, metavar="S", help=remote_ones)
    add("--methods", nargs="+", choices=METHODS, default=["PSA", OURS], metavar="M", help=beside)
    add("--k", nargs="+", type=positive, default=[1, 1024], help="knn: neighbours")
    pairs = "ralm: a question, the next one; other questions follow"
    add("--pairs", choices=("same", "rephrased", "turns"), default="", help=pairs)
    add("--limit", type=positive, default=10, metavar="N", help="only the first N prompts")
    add("--seeds", type=positive, metavar="N", help="sample N times; greedy by default")
    add("--max-new-tokens", type=positive, default=48, metavar="N")
    kept = "the calls, one a line; go on from them"
    add("--out", type=Path, default=Path(os.devnull), metavar="FILE", help=kept)
    args = parser.parse_args(arguments)
    commands[args.measured](args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
