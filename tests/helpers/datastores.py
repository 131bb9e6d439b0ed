"""Small datastores that are written by hand, and what is drafted from them."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np

from hf_refspec.drafting.contract import Call
from hf_refspec.drafting.datastore_drafts import DatastoreDrafts
from hf_refspec.index.suffix_array import DEPTH, IndexedText, build_suffix_array
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.datastore_config import ShardEntry, StoreConfig
from hf_refspec.store.files import check_file, write_arrays
from hf_refspec.store.shards import map_suffixes, map_tokens

FEW = {"max_ngram": 2, "ngrams_per_order": 20}
FINGERPRINT = "f" * 32
SOURCE = {
    "corpus": "Python | standard library",
    "license": "Apache-2.0",
    "deduplicated": True,
    "hf_refspec": "0.1.0",
}


def some_documents(vocab_size: int = 300, seed: int = 0) -> list[list[int]]:
    """Documents with much in common, an empty one among them."""
    generator = random.Random(seed)
    words = [generator.choices(range(vocab_size), k=generator.randint(1, 6)) for _ in range(12)]
    chosen = [generator.choices(words, k=9) for _ in range(20)]
    documents = [[token for word in some for token in word] for some in chosen]
    return [*documents, [], [vocab_size - 1]]


DOCUMENTS = some_documents()


def write_store(
    folder: Path,
    documents: list[list[int]],
    vocab_size: int = 300,
    cuts: tuple[int, ...] = (330,),
    fingerprint: str = FINGERPRINT,
) -> Datastore:
    """Writes a datastore by hand, its text cut into shards at the given places."""
    folder.mkdir()
    source = {**SOURCE, "documents": len(documents)}
    config = StoreConfig(fingerprint, "org/tokenizer", vocab_size, source)
    text = [token for document in documents for token in [*document, config.separator]]
    shards = []
    for i, (start, end) in enumerate(zip((0, *cuts), (*cuts, len(text)), strict=True), start=1):
        tokens = np.array(text[start:end], config.token_dtype)
        arrays = {"tokens": tokens, "suffixes": build_suffix_array(tokens)}
        files = [
            write_arrays(folder / f"{name}-{i:05d}.safetensors", {name: array})
            for name, array in arrays.items()
        ]
        shards.append(ShardEntry(len(tokens), text[start:end].count(config.separator), *files))
    replace(config, shards=shards).write(folder)
    return Datastore(folder)


def shards_of(documents, count=1, dtype=np.uint16, vocab_size=4) -> list[IndexedText]:
    """Deals documents out to shards in memory; a shard without one has an empty document."""
    shards = []
    for part in range(count):
        some = documents[part::count] or [[]]
        tokens = np.array([t for each in some for t in [*each, np.iinfo(dtype).max]], dtype)
        shards.append(IndexedText(tokens, build_suffix_array(tokens), vocab_size))
    return shards


def drafts_of(store: Datastore) -> list[tuple[list, list, list]]:
    drafter = DatastoreDrafts(store)
    drafts = []
    for token in range(300):
        drafter.begin(np.array([token]), 300)
        tree = drafter.draft(16, Call())
        tree.checked(300)
        drafts.append((tree.tokens.tolist(), tree.parents.tolist(), tree.probs.tolist()))
    assert any(tokens for tokens, _, _ in drafts)
    return drafts


def documents_of(folder: Path) -> list[list[int]]:
    """Reads a datastore's documents back, and checks all that it says about them."""
    config = StoreConfig.read(folder)
    begun: list[int] = []
    documents = []
    for shard in config.shards:
        for file in (shard.tokens_file, shard.suffixes_file):
            check_file(folder, file)
        tokens, suffixes = map_tokens(folder, config, shard), map_suffixes(folder, shard)
        assert sorted(suffixes.tolist()) == list(range(shard.tokens))
        wanted = build_suffix_array(tokens)
        assert np.array_equal(beginnings(tokens, suffixes), beginnings(tokens, wanted))
        before = len(documents)
        for token in tokens.tolist():
            if token == config.separator:
                documents.append(begun)
                begun = []
            else:
                begun.append(token)
        assert shard.documents == len(documents) - before
    assert not begun
    assert config.source["documents"] == len(documents)
    return documents


def beginnings(tokens: np.ndarray, suffixes: np.ndarray) -> np.ndarray:
    """The tokens at the start of suffixes by which they are sorted: those of their documents."""
    places = suffixes[:, None].astype(np.int64) + np.arange(DEPTH)
    read = np.where(places < len(tokens), tokens[places.clip(max=len(tokens) - 1)], -1.0)
    ended = np.cumsum(read == np.iinfo(tokens.dtype).max, axis=1)
    return np.where(np.roll(ended, 1, axis=1) * (np.arange(DEPTH) > 0), -1.0, read)
