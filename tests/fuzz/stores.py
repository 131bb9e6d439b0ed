"""A small real folder of each kind, and what a user does with one."""

import random
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from hf_refspec.drafting.calls import drafter_call
from hf_refspec.drafting.contract import Call, Drafter
from hf_refspec.drafting.datastore_drafts import DatastoreDrafts
from hf_refspec.drafting.session_drafts import SessionDrafts
from hf_refspec.drafting.token_recycling import TokenRecycling
from hf_refspec.ralm.knn_datastore import KnnDatastore
from hf_refspec.retrieval.bm25 import SparseRetriever
from hf_refspec.retrieval.dense import DenseRetriever
from hf_refspec.retrieval.knowledge_base import KnowledgeBase
from hf_refspec.retrieval.retriever import Retriever
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.hub import card
from hf_refspec.store.recycling_table import RecyclingTable
from hf_refspec.store.sessions import DATABASE
from hf_refspec.store.stored_folder import StoredFolder
from tests.helpers.byte_model import byte_llama, byte_tokenizer
from tests.helpers.drafters import drafted
from tests.helpers.texts import bag_of_words

# A use gets the folder, and an empty one to write into. What it returns is compared.
Use = Callable[[Path, Path], Any]


@dataclass(frozen=True)
class Kind:
    """One kind of stored folder: what builds a small one at a path, and what a user does with it:
    first what leaves it as it is, then what changes it, one after another."""

    name: str
    build: Callable[[Path], Any]
    readers: dict[str, Use] = field(default_factory=dict)
    writers: dict[str, Use] = field(default_factory=dict)


@contextmanager
def copied(folder: Path) -> Iterator[Path]:
    """The path `store` in a copy of all that is in a folder; it need not be there."""
    with tempfile.TemporaryDirectory(dir=folder.parent.parent) as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        yield Path(copy) / "store"


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@cache
def model() -> LlamaForCausalLM:
    return byte_llama(len(tokenizer()))


@cache
def texts(count: int = 12) -> list[str]:
    """Documents that repeat each other's words."""
    generator = random.Random(0)
    text = "the cat sat on a mat and the dog ate its hat for i in range(n): print(i)"
    words = text.split()
    return [" ".join(generator.choices(words, k=generator.randint(3, 12))) for _ in range(count)]


def token_ids(text: str) -> np.ndarray:
    ids: list[int] = tokenizer()(text, add_special_tokens=False)["input_ids"]
    return np.array(ids, dtype=np.int64)


def contexts() -> list[np.ndarray]:
    """Texts to go on from: one that is stored, its end, one token, and one that is not stored."""
    stored = token_ids(texts()[0])
    return [stored[:14], stored[4:6], stored[:1], token_ids("zebra and the c")]


def drafts(drafter: Drafter, prompts: list[np.ndarray]) -> list[Any]:
    """The draft trees after some prompts, each found to be a sound one."""
    found, vocab_size = [], len(tokenizer())
    for prompt in prompts:
        for budget in (1, 16, 64):
            with drafter_call(drafter, [prompt], vocab_size):
                tree = drafter.draft(budget, Call()).checked(vocab_size)
            if len(tree) > budget:
                raise AssertionError(f"{len(tree)} nodes were drafted of {budget}")
            found.append([tree.tokens.tolist(), tree.parents.tolist(), tree.probs.tolist()])
    return found


# Datastores

ALONE: dict[str, Any] = {"num_proc": 1, "progress": False}


def build_datastore(path: Path) -> None:
    store = Datastore.build(texts(), tokenizer(), path, shard_tokens=300, corpus_name="x", **ALONE)
    # So little that it stays a shard of its own.
    store = store.add({"name": [5, 6, 7, 5, 6]}, tokenizer(), **ALONE)
    assert len(store.shards) == 2
    store.compact(ngrams_per_order=20, progress=False)


def datastore() -> Kind:
    def trees(store: Datastore, published: bool = False) -> Any:
        return drafts(DatastoreDrafts(store, published=published), [*contexts(), np.array([5, 6])])

    def opened(folder: Path) -> Datastore:
        return Datastore(folder, form="full")

    def full(folder: Path, spare: Path) -> Any:
        store = opened(folder)
        return [trees(store, published) for published in (False, True)]

    def documents(folder: Path, spare: Path) -> Any:
        store = Datastore(folder)
        read = [document.tolist() for document in store.iter_documents()]
        if sum(map(len, read)) > store.tokens:
            raise AssertionError("the documents have more tokens than the datastore")
        return read

    def retokenized(folder: Path, spare: Path) -> Any:
        new = opened(folder).retokenize(tokenizer(), spare / "store", **ALONE)
        return [document.tolist() for document in new.iter_documents()]

    def compacted(folder: Path, spare: Path) -> Any:
        return trees(opened(folder).compact(ngrams_per_order=15, progress=False))

    def extended(folder: Path, spare: Path) -> Any:
        return trees(opened(folder).add({"name": [5, 6, 7, 5, 6, 8]}, tokenizer(), **ALONE))

    text = "the cat"
    readers: dict[str, Use] = {
        "full form": full,
        "compact form": lambda folder, _: trees(Datastore(folder, form="compact")),
        "documents": documents,
        "tokenizer": lambda folder, _: Datastore(folder).load_tokenizer()(text).input_ids,
        "for another tokenizer": retokenized,
        **shared_uses(Datastore),
    }
    writers: dict[str, Use] = {
        "compacted": compacted,
        "merged": lambda folder, _: trees(opened(folder).merge(progress=False)),
        "extended": extended,
    }
    return Kind("datastore", build_datastore, readers, writers)


def shared_uses(kind: Callable[[Path], StoredFolder]) -> dict[str, Use]:
    """What is done with all kinds that can be published."""

    def described(folder: Path, spare: Path) -> Any:
        store = kind(folder)
        text = card(store.config, "org/x")
        if not (text + repr(store)).replace("\n", "").isprintable():
            raise AssertionError(f"a control character is in the card or the repr: {text!r}")
        return text

    def copied(folder: Path, spare: Path) -> Any:
        kind(folder).save_pretrained(spare / "copy")
        return card(kind(spare / "copy").config, "org/x")

    return {"verify": lambda folder, _: kind(folder).verify(), "card": described, "copy": copied}


# Knowledge bases


def build_knowledge_base(path: Path) -> None:
    KnowledgeBase.build(texts(), tokenizer(), bag_of_words, path, chunk_length=16, progress=False)


def knowledge_base_uses() -> dict[str, Use]:
    def opened(folder: Path) -> KnowledgeBase:
        return KnowledgeBase(folder, tokenizer())

    def found(retriever: Retriever) -> Any:
        queries = [retriever.encode(context) for context in contexts()]
        return [
            [checked_ids(each.ids, len(retriever.knowledge_base)), each.scores.tolist()]
            for each in retriever.search(queries, 5)
        ]

    def dense(folder: Path, **options: Any) -> Any:
        return found(DenseRetriever(opened(folder), bag_of_words, **options))

    def passages(folder: Path, spare: Path) -> Any:
        base = opened(folder)
        return [
            [checked_ids(base.passage(i), len(tokenizer())), base.text(i)] for i in range(len(base))
        ]

    return {
        "flat": lambda folder, spare: dense(folder),
        "hnsw": lambda folder, spare: dense(folder, index="hnsw"),
        "BM25": lambda folder, spare: found(SparseRetriever(opened(folder), progress=False)),
        "passages": passages,
        **shared_uses(opened),
    }


def checked_ids(ids: np.ndarray, below: int) -> list[int]:
    if len(ids) and not 0 <= ids.min() <= ids.max() < below:
        raise AssertionError(f"ids are from {ids.min()} to {ids.max()}, of {below}")
    return ids.tolist()


# kNN datastores


def build_knn_datastore(path: Path) -> None:
    KnnDatastore.build(texts(24), tokenizer(), model(), path, progress=False)


def knn_uses() -> dict[str, Use]:
    def found(store: KnnDatastore) -> Any:
        queries = list(np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32))
        results = []
        for query, each in zip(queries, store.search(queries, 8), strict=True):
            checked_ids(each.ids, len(store))
            tokens, probs = store.next_tokens(each, 1.0)
            checked_ids(tokens, len(tokenizer()))
            if not abs(probs.sum() - 1) < 1e-6:
                raise AssertionError(f"the probabilities of the next tokens are {probs}")
            scores = store.score(query, each.ids).tolist()
            ids = checked_ids(store.next_entries(each.ids), len(store))
            results.append([each.ids.tolist(), tokens.tolist(), probs.tolist(), scores, ids])
        return results

    return {
        "flat": lambda folder, spare: found(KnnDatastore(folder)),
        "hnsw": lambda folder, spare: found(KnnDatastore(folder, index="hnsw")),
        **shared_uses(KnnDatastore),
    }


# Retrieval caches


def sessions(count: int = 30, seed: int = 2) -> list[tuple[np.ndarray, np.ndarray]]:
    generator = random.Random(seed)
    return [
        (token_ids(generator.choice(texts()))[:20], token_ids(generator.choice(texts()))[:12])
        for _ in range(count)
    ]


def opened_cache(path: Path) -> SessionDrafts:
    return SessionDrafts(tokenizer(), path=path)


def build_cache(path: Path) -> None:
    """A cache whose newest calls are still in SQLite's log, as a killed process leaves it."""
    source = path.with_name("open")
    cache = opened_cache(source)
    for session in sessions():
        cache.add(*session)
    with closing(sqlite3.connect(source / DATABASE)) as connection:
        connection.execute("SELECT count(*) FROM session").fetchone()  # now closing keeps the log
        for session in sessions(12, seed=3):
            cache.add(*session)
        shutil.copytree(source, path)
    (path / f"{DATABASE}-shm").unlink()


def remembered(cache: SessionDrafts) -> list[Any]:
    found = cache._memory.refresh().sessions()
    return [[prompt.tolist(), output.tolist()] for prompt, output in found]


def used_cache(folder: Path, spare: Path) -> Any:
    new = token_ids("a call"), token_ids(" that is new")
    cache, other = opened_cache(folder), opened_cache(folder)
    before = remembered(cache)
    found = drafts(cache, contexts())
    cache.add(*new)
    is_kept = cache._memory._keeps
    found += drafts(other, [new[0]])
    if is_kept and remembered(opened_cache(folder)) != [*before, [each.tolist() for each in new]]:
        raise AssertionError("an acknowledged call, or an older one, is lost")
    return before, found


# Recycling tables


def build_recycling_table(path: Path) -> None:
    drafter = TokenRecycling.build(texts()[:4], tokenizer(), model(), progress=False)
    drafter.save_pretrained(path)


def recycling_uses() -> dict[str, Use]:
    prompts = [token_ids(text)[:end] for text in texts()[:4] for end in range(4, 16)]

    def opened(folder: Path) -> TokenRecycling:
        return TokenRecycling.from_pretrained(folder, tokenizer())

    def recycled(folder: Path, spare: Path) -> Any:
        drafter, size = opened(folder), len(tokenizer())  # which drafts once it has observed
        trees = [drafted(drafter, ids[:-1], ids[-1:].tolist(), 16, size) for ids in prompts]
        return [(each.tokens.tolist(), each.parents.tolist(), str(each.probs)) for each in trees]

    def saved(folder: Path, spare: Path) -> Any:
        opened(folder).save_pretrained(spare / "copy")
        return RecyclingTable(spare / "copy", tokenizer()).config.contexts

    return {
        "drafts": recycled,
        **shared_uses(lambda folder: RecyclingTable(folder, tokenizer())),
        "saved again": saved,
    }


KINDS = [
    datastore(),
    Kind("knowledge base", build_knowledge_base, knowledge_base_uses()),
    Kind("kNN datastore", build_knn_datastore, knn_uses()),
    Kind("session store", build_cache, {}, {"opened, used and opened again": used_cache}),
    Kind("recycling table", build_recycling_table, recycling_uses()),
]
