"""The commands about datastores: `hf-refspec build`, `extend`, `compact`, `info` and `search`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..drafting.datastore_drafts import DatastoreDrafts
from ..drafting.tree import ROOT, DraftTree
from ..index.rest_trie import all_matches
from ..store.build.presets import PRESETS
from ..store.datastore import Datastore
from ..store.folder import DatastoreError

EXAMPLES = 3
EXAMPLE_TOKENS = 12


def build(options: argparse.Namespace) -> int:
    """`hf-refspec build`."""
    source, corpus, license = _source(options)
    store = Datastore.build(
        source,
        AutoTokenizer.from_pretrained(options.tokenizer),
        options.out,
        column=options.column,
        pattern=options.pattern,
        shard_tokens=options.shard_tokens,
        num_proc=options.num_proc,
        deduplicate=options.deduplicate,
        resume=options.resume,
        engine=options.engine,
        license=options.license or license,
        corpus=options.corpus or corpus,
    )
    _print_info(store)
    return 0


def extend(options: argparse.Namespace) -> int:
    """`hf-refspec extend`."""
    source, _, _ = _source(options)
    store = Datastore(options.store).extend(
        source,
        AutoTokenizer.from_pretrained(options.tokenizer),
        column=options.column,
        pattern=options.pattern,
        num_proc=options.num_proc,
        deduplicate=options.deduplicate,
        resume=options.resume,
        engine=options.engine,
    )
    _print_info(store)
    return 0


def compact(options: argparse.Namespace) -> int:
    """`hf-refspec compact`."""
    store = Datastore(options.store).compact(
        options.out,
        max_ngram=options.max_ngram,
        ngrams_per_order=options.ngrams_per_order,
        max_bytes=options.max_bytes,
    )
    _print_info(store)
    return 0


def info(options: argparse.Namespace) -> int:
    """`hf-refspec info`."""
    store = Datastore.from_pretrained(options.store)
    _print_info(store)
    if options.verify:
        store.verify()
        print("all files are as they were written")
    return 0


def search(options: argparse.Namespace) -> int:
    """`hf-refspec search`."""
    store = Datastore.from_pretrained(options.store, options.form)
    tokenizer = store.load_tokenizer(options.tokenizer)
    ids = np.array(tokenizer(options.text, add_special_tokens=False)["input_ids"], dtype=np.int64)
    if len(ids) == 0:
        raise ValueError("text has no tokens; give at least a word")
    if store.form == "full":
        _print_matches(store, ids, tokenizer)
    drafts = DatastoreDrafts(store)
    drafts.begin(ids, store.config.vocab_size)
    tree = drafts.draft(options.nodes)
    print(f"the draft tree, {len(tree)} nodes, each with the probability that it is accepted:")
    _print_tree(tree, tokenizer)
    return 0


def _source(options: argparse.Namespace) -> tuple[Any, str | None, str | None]:
    """What a command is to read, what that is called, and its licence."""
    given = [bool(options.source), options.dataset is not None, options.preset is not None]
    if sum(given) != 1:
        raise ValueError("give one of: files or folders, --dataset NAME, --preset NAME")
    if options.preset is not None:
        files, corpus, license = PRESETS[options.preset]
        return files(), corpus, license
    if options.dataset is not None:
        from datasets import load_dataset  # part of the extra `datastore`

        return (
            load_dataset(
                options.dataset, options.config, split=options.split, streaming=options.streaming
            ),
            None,
            None,
        )
    return options.source[0] if len(options.source) == 1 else options.source, None, None


def _print_info(store: Datastore) -> None:
    config, about = store.config, store.config.source
    print(store.path)
    print(f"  corpus      {about.get('corpus') or 'not stated'}")
    print(f"  licence     {about.get('license') or 'not stated'}")
    print(f"  tokenizer   {config.tokenizer}, fingerprint {config.fingerprint}")
    print(f"  vocabulary  {config.vocab_size:,}")
    if config.shards:
        size = sum(shard.tokens_file.size + shard.suffixes_file.size for shard in config.shards)
        print(
            f"  full        {store.tokens:,} tokens, {store.documents:,} documents, "
            f"{len(config.shards)} shards, {_megabytes(size)}, {size / store.tokens:.2f} bytes a "
            "token"
        )
    if config.ngrams:
        orders = ", ".join(f"{n:,}" for n in config.ngrams.ngrams)
        print(
            f"  compact     {sum(config.ngrams.ngrams):,} n-grams ({orders} of the orders 1, 2, "
            f"...), {config.ngrams.nodes:,} nodes, {_megabytes(config.ngrams.file.size)}, of "
            f"{config.ngrams.corpus_tokens:,} tokens"
        )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _print_matches(store: Datastore, ids: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> None:
    """The longest match, how often it occurs, and what stands around it in some places."""
    matches = all_matches(store.shards, ids.astype(np.int32), 1)
    if not matches:
        print("not even the last token occurs")
        return
    match = matches[0]
    words = tokenizer.decode(ids[-match.length :])
    print(f"the last {match.length} tokens, {words!r}, occur {match.count:,} times, such as:")
    examples = [
        (shard, index)
        for shard, (low, high) in zip(store.shards, match.ranges, strict=True)
        for index in range(low, min(high, low + EXAMPLES))
    ]
    for shard, index in examples[:EXAMPLES]:
        position = int(shard.suffixes[index])
        if position < 0:
            raise DatastoreError(f"{store.path} is damaged: verify() tells which file it is")
        end = position + match.length
        before = _part(shard.tokens[max(position - EXAMPLE_TOKENS, 0) : position][::-1], shard)
        after = _part(shard.tokens[end : end + EXAMPLE_TOKENS], shard)
        texts = (tokenizer.decode(part) for part in (before[::-1], ids[-match.length :], after))
        print("  …{}⟦{}⟧{}…".format(*map(_line, texts)))


def _part(tokens: np.ndarray, shard: Any) -> np.ndarray:
    """The tokens up to the document's end."""
    ends = np.flatnonzero(tokens == shard.separator)
    return tokens[: ends[0]] if len(ends) else tokens


def _line(text: str) -> str:
    return text.replace("\n", "↵")


def _print_tree(tree: DraftTree, tokenizer: PreTrainedTokenizerBase) -> None:
    """One line a node, each child indented below its parent, the most probable first."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents.tolist()):
        children.setdefault(parent, []).append(node)
    waiting = [(node, 1) for node in reversed(children.get(ROOT, []))]
    while waiting:
        node, depth = waiting.pop()
        token = tokenizer.convert_ids_to_tokens(int(tree.tokens[node]))
        print(f"{tree.probs[node]:6.3f} {'  ' * depth}{token}")
        waiting += [(child, depth + 1) for child in reversed(children.get(node, []))]
