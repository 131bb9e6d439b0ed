"""A small real folder of each kind, and what a user does with one."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from byte_model import byte_llama, byte_tokenizer
from encoders import letters
from tokenizers import Tokenizer, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from hf_refspec.drafting.datastore_drafts import DatastoreDrafts
from hf_refspec.drafting.drafter import Drafter
from hf_refspec.drafting.sessions import memory
from hf_refspec.drafting.sessions.retrieval_cache import RetrievalCache
from hf_refspec.drafting.token_recycling import TokenRecycling
from hf_refspec.ralm.knn_datastore import KnnDatastore
from hf_refspec.retrieval.bm25 import SparseRetriever
from hf_refspec.retrieval.dense import DenseRetriever
from hf_refspec.retrieval.knowledge_base import KnowledgeBase
from hf_refspec.retrieval.retriever import Retriever
from hf_refspec.store.card import card
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.recycling_table import RecyclingTable
from hf_refspec.store.sessions import DATABASE
from hf_refspec.store.stored_folder import StoredFolder

# A use gets the folder, and an empty one to write into. What it returns is compared.
Use = Callable[[Path, Path], Any]
ENCODER = letters(8)
WIDE_VOCABULARY = 70_000
SEAL_TOKENS = 64  # of a cache, so that it soon has segments


@dataclass(frozen=True)
class Kind:
    """One kind of stored folder.

    Attributes:
        name (`str`): What it is called.
        build (`Callable`): Makes a small one at a path.
        readers (`dict[str, Use]`): What a user does with it that leaves it as it is.
        writers (`dict[str, Use]`): What changes it, done one after another.
    """

    name: str
    build: Callable[[Path], Any]
    readers: dict[str, Use] = field(default_factory=dict)
    writers: dict[str, Use] = field(default_factory=dict)

    def uses(self) -> dict[str, Use]:
        """All of these, readers first."""
        return {**self.readers, **self.writers}


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@cache
def wide_tokenizer() -> PreTrainedTokenizerFast:
    """One whose tokens do not fit into 16 bits."""
    vocab = {f"w{i}": i for i in range(WIDE_VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    )


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


def drafts(drafter: Drafter, prompts: list[np.ndarray], vocab_size: int) -> list[Any]:
    """The draft trees after some prompts, each found to be a sound one."""
    found = []
    for prompt in prompts:
        for budget in (1, 16, 64):
            with drafter.session(prompt, vocab_size):
                tree = drafter.draft(budget).checked(vocab_size)
            if len(tree) > budget:
                raise AssertionError(f"{len(tree)} nodes were drafted of {budget}")
            found.append([tree.tokens.tolist(), tree.parents.tolist(), tree.probs.tolist()])
    return found


# Datastores


def build_datastore(path: Path) -> None:
    store = Datastore.build(
        texts(), tokenizer(), path, shard_tokens=300, num_proc=1, corpus="x", progress=False
    )
    # So little that it stays a shard of its own.
    store = store.extend([[5, 6, 7, 5, 6]], tokenizer(), num_proc=1, progress=False)
    assert len(store.shards) == 2
    store.compact(ngrams_per_order=20, progress=False)


def wide_documents() -> list[list[int]]:
    generator = random.Random(1)
    words = [generator.choices(range(WIDE_VOCABULARY), k=5) for _ in range(8)]
    return [list(chain(*generator.choices(words, k=6))) for _ in range(12)]


def build_wide_datastore(path: Path) -> None:
    options = {"num_proc": 1, "progress": False}
    store = Datastore.build(wide_documents(), wide_tokenizer(), path, shard_tokens=250, **options)
    store.compact(ngrams_per_order=20, progress=False)


def wide_contexts() -> list[np.ndarray]:
    document = np.array(wide_documents()[0])
    return [document[:14], document[4:6], np.array([7])]


def small(vocab_size: int) -> bool:
    """Whether its tokenizer is made and read in less than a third of a second."""
    return vocab_size < WIDE_VOCABULARY


def datastore_uses(prompts: Callable[[], list[np.ndarray]], vocab_size: int) -> dict[str, Use]:
    def full(folder: Path, spare: Path) -> Any:
        store = Datastore(folder, form="full")
        modes = ("mixed", "rest")
        return [drafts(DatastoreDrafts(store, mode=mode), prompts(), vocab_size) for mode in modes]

    def compact(folder: Path, spare: Path) -> Any:
        store = Datastore(folder, form="compact")
        return drafts(DatastoreDrafts(store), prompts(), vocab_size)

    def documents(folder: Path, spare: Path) -> Any:
        store = Datastore(folder)
        read = [document.tolist() for document in store.iter_documents()]
        if sum(map(len, read)) > store.tokens:
            raise AssertionError("the documents have more tokens than the datastore")
        return read

    def compacted(folder: Path, spare: Path) -> Any:
        store = Datastore(folder, form="full")
        drafts(DatastoreDrafts(store), prompts()[:1], vocab_size)  # or it is for another model
        new = store.compact(spare / "compact", ngrams_per_order=9, progress=False)
        return drafts(DatastoreDrafts(new), prompts()[:2], vocab_size)

    def tokenized(folder: Path, spare: Path) -> Any:
        loaded = Datastore(folder).load_tokenizer()
        return loaded("the cat")["input_ids"]

    def retokenized(folder: Path, spare: Path) -> Any:
        store = Datastore(folder, form="full")
        new = store.retokenize(tokenizer(), spare / "store", num_proc=1, progress=False)
        return [document.tolist() for document in new.iter_documents()]

    of_tokenizer = {"tokenizer": tokenized, "for another tokenizer": retokenized}
    return {
        "full form": full,
        "compact form": compact,
        "documents": documents,
        "compacted elsewhere": compacted,
        **(of_tokenizer if small(vocab_size) else {}),
        **shared_uses(Datastore),
    }


def datastore_writers(prompts: Callable[[], list[np.ndarray]], vocab_size: int) -> dict[str, Use]:
    def extended(folder: Path, spare: Path) -> Any:
        more = [[5, 6, 7, 5, 6, 8]]
        store = Datastore(folder, form="full")
        store = store.extend(more, tokenizer(), num_proc=1, progress=False)
        return drafts(DatastoreDrafts(store), [*prompts()[:1], np.array([5, 6])], vocab_size)

    def compacted(folder: Path, spare: Path) -> Any:
        store = Datastore(folder, form="full").compact(ngrams_per_order=15, progress=False)
        return drafts(DatastoreDrafts(store), prompts()[:2], vocab_size)

    def merged(folder: Path, spare: Path) -> Any:
        store = Datastore(folder, form="full").merge(num_proc=1, progress=False)
        return drafts(DatastoreDrafts(store), prompts()[:2], vocab_size)

    writers = {"compacted": compacted, "merged": merged}
    return writers | ({"extended": extended} if small(vocab_size) else {})


def shared_uses(kind: Callable[[Path], StoredFolder]) -> dict[str, Use]:
    """What is done with all kinds that can be published."""

    def verified(folder: Path, spare: Path) -> Any:
        kind(folder).verify()

    def described(folder: Path, spare: Path) -> Any:
        store = kind(folder)
        text = card(store.config, "org/x")
        if not (text + repr(store)).replace("\n", "").isprintable():
            raise AssertionError(f"a control character is in the card or the repr: {text!r}")
        return text

    def copied(folder: Path, spare: Path) -> Any:
        kind(folder).save_pretrained(spare / "copy")
        return card(kind(spare / "copy").config, "org/x")

    return {"verify": verified, "card": described, "copy": copied}


# Knowledge bases


def build_knowledge_base(path: Path) -> None:
    KnowledgeBase.build(texts(), tokenizer(), ENCODER, path, chunk_length=16, progress=False)


def knowledge_base_uses() -> dict[str, Use]:
    def opened(folder: Path) -> KnowledgeBase:
        return KnowledgeBase(folder, tokenizer())

    def found(retriever: Retriever) -> Any:
        queries = [retriever.encode(context) for context in contexts()]
        return [
            [checked_ids(each.ids, len(retriever.knowledge_base)), each.scores.tolist()]
            for each in retriever.search(queries, 5)
        ]

    def dense(folder: Path, spare: Path) -> Any:
        return found(DenseRetriever(opened(folder), ENCODER))

    def hnsw(folder: Path, spare: Path) -> Any:
        return found(DenseRetriever(opened(folder), ENCODER, index="hnsw"))

    def sparse(folder: Path, spare: Path) -> Any:
        return found(SparseRetriever(opened(folder), progress=False))

    def passages(folder: Path, spare: Path) -> Any:
        base = opened(folder)
        return [
            [checked_ids(base.passage(i), len(tokenizer())), base.text(i), base.source(i)]
            for i in range(len(base))
        ]

    return {
        "flat": dense,
        "hnsw": hnsw,
        "BM25": sparse,
        "passages": passages,
        **shared_uses(lambda folder: opened(folder)),
    }


def checked_ids(ids: np.ndarray, below: int) -> list[int]:
    if len(ids) and not 0 <= ids.min() <= ids.max() < below:
        raise AssertionError(f"ids are from {ids.min()} to {ids.max()}, of {below}")
    return ids.tolist()


# kNN datastores


def build_knn_datastore(path: Path) -> None:
    store = KnnDatastore.build(model(), tokenizer(), texts(24), path, progress=False)
    store.add_pq_index()
    store.tune(model(), tokenizer(), [text[::-1] for text in texts()])


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
            ids = checked_ids(store.neighbours(each.ids), len(store))
            results.append([each.ids.tolist(), tokens.tolist(), probs.tolist(), scores, ids])
            if store.pq_index is not None:
                results.append(checked_ids(store.pq_index.candidates(query, 4), len(store)))
        return results

    def flat(folder: Path, spare: Path) -> Any:
        return found(KnnDatastore(folder))

    def hnsw(folder: Path, spare: Path) -> Any:
        return found(KnnDatastore(folder, index="hnsw"))

    return {"flat": flat, "hnsw": hnsw, **shared_uses(KnnDatastore)}


def knn_writers() -> dict[str, Use]:
    def with_pq_index(folder: Path, spare: Path) -> Any:
        store = KnnDatastore(folder)
        store.add_pq_index()
        return store.config.entries

    return {"PQ index": with_pq_index}


# Retrieval caches


def sessions(count: int = 30, seed: int = 2) -> list[tuple[np.ndarray, np.ndarray]]:
    generator = random.Random(seed)
    return [
        (token_ids(generator.choice(texts()))[:20], token_ids(generator.choice(texts()))[:12])
        for _ in range(count)
    ]


def open_cache(path: Path) -> RetrievalCache:
    """One that soon seals and joins segments."""
    memory.SEAL_TOKENS = SEAL_TOKENS
    return RetrievalCache(tokenizer(), path=path)


def build_cache(path: Path) -> None:
    """A cache whose newest calls are in SQLite's log still, as a process leaves it that is
    killed."""
    cache, other = open_cache(path.with_name("open")), open_cache(path.with_name("open"))
    for session in sessions():
        cache.add(*session)
    cache.close()
    other._memory._database._connection.execute("PRAGMA wal_checkpoint")
    for session in sessions(12, seed=3):
        other.add(*session)
    shutil.copytree(path.with_name("open"), path)
    (path / f"{DATABASE}-shm").unlink()
    other.close()


def remembered(cache: RetrievalCache) -> list[Any]:
    found = cache._memory.refresh().sessions()
    return [[prompt.tolist(), output.tolist()] for prompt, output in found]


def cache_writers() -> dict[str, Use]:
    def used(folder: Path, spare: Path) -> Any:
        new = token_ids("a call"), token_ids(" that is new")
        with_new = [each.tolist() for each in new]
        cache, other = open_cache(folder), open_cache(folder)
        try:
            before = remembered(cache)
            found = drafts(cache, contexts(), len(tokenizer()))
            cache.add(*new)
            is_kept = cache._memory._keeps
            found += drafts(other, [new[0]], len(tokenizer()))
        finally:
            cache.close()
            other.close()
        cache = open_cache(folder)
        try:
            if is_kept and remembered(cache) != [*before, with_new]:
                raise AssertionError("an acknowledged call, or an older one, is lost")
        finally:
            cache.close()
        return before, found

    return {"opened, used and opened again": used}


# Recycling tables


def build_recycling_table(path: Path) -> None:
    drafter = TokenRecycling.build(model(), tokenizer(), texts()[:4], progress=False)
    drafter.save_pretrained(path)


def recycling_uses() -> dict[str, Use]:
    def drafted(folder: Path, spare: Path) -> Any:
        drafter = TokenRecycling.from_pretrained(folder, tokenizer())
        return drafts(drafter, contexts(), len(tokenizer()))

    def saved(folder: Path, spare: Path) -> Any:
        drafter = TokenRecycling.from_pretrained(folder, tokenizer())
        drafter.save_pretrained(spare / "copy")
        return RecyclingTable(spare / "copy", tokenizer()).config.contexts

    opened = shared_uses(lambda folder: RecyclingTable(folder, tokenizer()))
    return {"drafts": drafted, **opened, "saved again": saved}


KINDS = [
    Kind(
        "datastore",
        build_datastore,
        datastore_uses(contexts, 259),
        datastore_writers(contexts, 259),
    ),
    Kind(
        "wide datastore",
        build_wide_datastore,
        datastore_uses(wide_contexts, WIDE_VOCABULARY),
        datastore_writers(wide_contexts, WIDE_VOCABULARY),
    ),
    Kind("knowledge base", build_knowledge_base, knowledge_base_uses()),
    Kind("kNN datastore", build_knn_datastore, knn_uses(), knn_writers()),
    Kind("retrieval cache", build_cache, {}, cache_writers()),
    Kind("recycling table", build_recycling_table, recycling_uses()),
]
