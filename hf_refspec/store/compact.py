"""The compact form of a datastore: its commonest n-grams, each with its draft tree (CREST)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from ..index.crest_table import NgramTable, build_table, table_bytes
from ..index.draft_tree import TreeArrays
from ..index.mixed_trie import mixed_tree
from ..index.ngram_counts import common_ngrams as ngrams_of_text
from ..index.suffix_array import IndexedText
from .datastore_config import NGRAMS, NgramsEntry, StoreConfig
from .files import DatastoreError, check_no_folder, read_arrays, write_arrays
from .folder import sweep

NODES_PER_TREE = 64
NGRAMS_PER_ORDER = 20_000
CONTINUATIONS = 1000
CONTINUATION_LENGTH = 10
HEADER_BYTES = 1024  # of the file, at most

ARRAYS = ("keys", "slots", "starts", "node_tokens", "node_parents", "node_probs")


def compact_form(
    texts: Sequence[IndexedText],
    config: StoreConfig,
    max_ngram: int,
    ngrams_per_order: int | None,
    max_bytes: int | None,
    progress: bool,
) -> tuple[list[int], NgramTable]:
    """Counts the commonest n-grams of each order and builds their table; arguments as of
    [`Datastore.compact`]."""
    dtype = config.token_dtype
    if ngrams_per_order is None:
        ngrams_per_order = NGRAMS_PER_ORDER
        if max_bytes is not None:  # more than fit, even if most of their trees are small
            ngrams_per_order = max_bytes // table_bytes(1, NODES_PER_TREE // 4, max_ngram, dtype)
    orders = common_ngrams(texts, max_ngram, ngrams_per_order)
    if any(int(ngrams.max(initial=0)) >= config.vocab_size for ngrams in orders):
        raise ValueError("it is damaged: its documents have tokens outside of its vocabulary")
    trees: list[list[TreeArrays]] = [[] for _ in orders]
    entries = nodes = 0
    limits = (NODES_PER_TREE, CONTINUATIONS, CONTINUATION_LENGTH)
    # The commonest first. Where `max_bytes` is short, each order gets half as many as the previous
    # one: short n-grams are of more use on text that is not in the corpus.
    ranked = [
        (rank << order, order, rank)
        for order in range(max_ngram)
        for rank in range(len(orders[order]))
    ]
    for _, order, rank in tqdm(
        sorted(ranked), "draft trees", disable=not progress or None, delay=1
    ):
        tree = mixed_tree(texts, orders[order][rank], 1, *limits)
        entries, nodes = entries + 1, nodes + len(tree[0])
        size = HEADER_BYTES + table_bytes(entries, nodes, max_ngram, dtype)
        if max_bytes is not None and size > max_bytes:
            break
        trees[order].append(tree)
    kept = [ngrams[: len(those)] for ngrams, those in zip(orders, trees, strict=True)]
    table = build_table(kept, [*chain(*trees)], dtype, config.vocab_size)
    return [len(ngrams) for ngrams in kept], table


def common_ngrams(texts: Sequence[IndexedText], max_ngram: int, per_order: int) -> list[np.ndarray]:
    """Finds the commonest n-grams of each order from 1 on, int32 of shape `(count, n)`, the
    commonest first.

    The texts are read one after another, in memory that does not grow with them. An n-gram that is
    not among the commonest of any single text is left out.
    """
    candidates: list[list[np.ndarray]] = [[] for _ in range(max_ngram)]
    for text in texts:
        of_text = ngrams_of_text(text, max_ngram, per_order)
        for found, ngrams in zip(candidates, of_text, strict=True):
            found.append(ngrams)
    common = []
    for found in candidates:
        ngrams = np.unique(np.concatenate(found), axis=0)
        occurrences = [
            sum(high - low for low, high in (text.find(each) for text in texts)) for each in ngrams
        ]
        counts = np.array(occurrences, dtype=np.int64)
        commonest = np.argsort(-counts, kind="stable")[:per_order]
        common.append(ngrams[commonest])
    return common


def write_ngrams(
    folder: Path, config: StoreConfig, table: NgramTable, counts: list[int], corpus_tokens: int
) -> None:
    """Writes the compact form into a datastore's folder and replaces an older one."""
    arrays = {name: getattr(table, name) for name in ARRAYS}
    written = write_arrays(folder / "ngrams-000000000000.safetensors", arrays)
    # Named after its content, so that the older one stays until config.json names this one.
    file = replace(written, name=f"ngrams-{written.sha256[:12]}.safetensors")
    check_no_folder(folder / file.name)
    os.replace(folder / written.name, folder / file.name)
    nodes = len(table.node_tokens)
    config = replace(config, ngrams=NgramsEntry(counts, nodes, corpus_tokens, file))
    config.write(folder)
    sweep(folder, [NGRAMS], config.files())


def open_ngrams(folder: Path, config: StoreConfig, entry: NgramsEntry) -> NgramTable:
    """Memory-maps the compact form; raises as [`read_arrays`]."""
    entries, dtype, max_ngram = sum(entry.ngrams), config.token_dtype, len(entry.ngrams)
    arrays = read_arrays(
        folder,
        entry.file,
        {
            "keys": (dtype, entries * max_ngram),
            "slots": (np.uint32, None),
            "starts": (np.uint32, entries + 1),
            "node_tokens": (dtype, entry.nodes),
            "node_parents": (np.uint8, entry.nodes),
            "node_probs": (np.uint8, entry.nodes),
        },
    )
    if len(arrays["slots"]).bit_count() != 1:
        raise DatastoreError(
            f"{folder / entry.file.name} is damaged: slots has {len(arrays['slots'])} entries, no "
            "power of two"
        )
    return NgramTable(**arrays, max_ngram=max_ngram, vocab_size=config.vocab_size)
