"""CREST: builds, writes and opens the compact form of a datastore, which is one n-gram table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from ..index.best_first import TreeArrays
from ..index.crest import NgramTable, best_nodes, common_ngrams, pack_table, table_bytes
from ..index.rest_trie import mixed_tree, rest_tree
from ..index.suffix_array import IndexedText
from ..notebooks import is_hidden
from .datastore_config import NGRAMS, NgramsEntry, StoreConfig
from .files import DatastoreError, only_writer, read_arrays, sweep, write_arrays

NODES_PER_TREE = 64
NGRAMS_PER_ORDER = 20_000
HEADER_BYTES = 1024  # of the file, at most
LEAST_BYTES = 4096


def build_ngram_table(
    texts: Sequence[IndexedText],
    config: StoreConfig,
    published: bool,
    max_ngram: int,
    ngrams_per_order: int | None,
    max_bytes: int | None,
    progress: bool,
) -> tuple[list[int], NgramTable]:
    """Counts the commonest n-grams of each order and builds their table.

    For the options see [`Datastore.compact`]."""
    dtype = config.token_dtype
    candidates = ngrams_per_order
    if candidates is None and max_bytes is not None:
        # More than fit, even if most of their trees are small.
        candidates = max_bytes // table_bytes(1, NODES_PER_TREE // 4, max_ngram, dtype)
    elif candidates is None and not published:  # no more than the full form takes
        max_bytes = max(LEAST_BYTES, sum(t.tokens.nbytes + t.suffixes.nbytes for t in texts))
    ngrams, counts = common_ngrams(texts, max_ngram, candidates or NGRAMS_PER_ORDER)
    grow = rest_tree if published else mixed_tree
    trees: list[TreeArrays] = []
    shown = {"desc": "draft trees", "disable": is_hidden(progress), "delay": 1}
    for ngram in tqdm([ngram for order in ngrams for ngram in order], **shown):
        min_match = len(ngram) if published else 1
        trees.append(grow(texts, ngram, min_match, NODES_PER_TREE))
    if max_bytes is not None and trees:

        def bytes_of(entries: int, nodes: int) -> int:
            return HEADER_BYTES + table_bytes(entries, nodes, max_ngram, dtype)

        sizes = best_nodes(ngrams, np.concatenate(counts), trees, bytes_of, max_bytes)
        kept = np.split(sizes > 0, np.cumsum([len(order) for order in ngrams])[:-1])
        ngrams = [order[is_kept] for order, is_kept in zip(ngrams, kept, strict=True)]
        trees = [
            (tokens[:size], parents[:size], probs[:size])
            for (tokens, parents, probs), size in zip(trees, sizes.tolist(), strict=True)
            if size
        ]
    return [len(order) for order in ngrams], pack_table(ngrams, trees, dtype, config.vocab_size)


def write_ngram_table(
    folder: Path, config: StoreConfig, table: NgramTable, counts: list[int], corpus_tokens: int
) -> None:
    """Writes the compact form into a datastore's folder and replaces an older one."""
    arrays = {k: v for k, v in table._asdict().items() if isinstance(v, np.ndarray)}
    written = write_arrays(folder / "ngrams-000000000000.safetensors", arrays)
    # Named after its content, so that the older one stays until config.json names this one.
    file = replace(written, name=f"ngrams-{written.sha256[:12]}.safetensors")
    os.replace(folder / written.name, folder / file.name)
    entry = NgramsEntry(counts, len(table.node_tokens), corpus_tokens, file)
    config = replace(config, ngrams=entry)
    config.write(folder)
    sweep(folder, [NGRAMS], config.files())


def replace_ngram_table(
    folder: Path, opened: StoreConfig, table: NgramTable, counts: list[int]
) -> None:
    """Adds the compact form to a datastore that may have changed since it was opened."""
    with only_writer(folder):
        config = StoreConfig.read(folder)
        if config.fingerprint != opened.fingerprint or config.tokens < opened.tokens:
            raise DatastoreError(f"{folder} has been replaced meanwhile; open it again")
        write_ngram_table(folder, config, table, counts, opened.tokens)


def open_ngram_table(folder: Path, config: StoreConfig) -> NgramTable:
    """Memory-maps the compact form; raises as [`read_arrays`]."""
    entry = config.ngrams
    assert entry is not None
    entries = sum(entry.ngrams)
    max_ngram = len(entry.ngrams)
    dtype = config.token_dtype
    shapes = {
        "keys": (dtype, entries * max_ngram),
        "slots": (np.uint32, None),
        "starts": (np.uint32, entries + 1),
        "node_tokens": (dtype, entry.nodes),
        "node_parents": (np.uint8, entry.nodes),
        "node_probs": (np.uint8, entry.nodes),
    }
    arrays = read_arrays(folder, entry.file, shapes)
    if (slots := len(arrays["slots"])).bit_count() != 1:
        raise DatastoreError(
            f"{folder / entry.file.name} is damaged: slots has {slots} entries, no power of two"
        )
    return NgramTable(**arrays, max_ngram=max_ngram, vocab_size=config.vocab_size)
