"""`hf-refspec store search`: what a datastore has for a text."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...drafting.datastore_drafts import DatastoreDrafts
from ...drafting.tree import ROOT, DraftTree
from ...index.rest_trie import all_matches
from ...store.datastore import Datastore
from ...store.files import DatastoreError
from ...store.printable import printable
from ..shared.text_stream import PART_OF_CHARACTER

NODES = 24
EXAMPLES = 3
EXAMPLE_TOKENS = 12


def add_search(parser: ArgumentParser) -> None:
    parser.set_defaults(run=_search)
    parser.add_argument("store", help="a folder or a Hub id")
    parser.add_argument("text", help="the text that the drafts continue")


def _search(args: Namespace) -> int:
    """Prints the longest match with some places where it occurs, and the draft tree."""
    store = Datastore.from_pretrained(args.store)
    tokenizer = store.load_tokenizer()
    with store.naming_damage():
        ids = np.array(tokenizer(args.text, add_special_tokens=False)["input_ids"], dtype=np.int64)
        if len(ids) == 0:
            raise ValueError("text has no tokens; give at least a word")
        if store.form == "full":
            _print_matches(store, ids, tokenizer)
        drafts = DatastoreDrafts(store)
        drafts.begin(ids, store.config.vocab_size)
        tree = drafts.draft(NODES)
        print(f"the draft tree, {len(tree)} nodes, each with the probability that it is accepted:")
        _print_tree(tree, ids.tolist(), tokenizer)
    return 0


def _print_matches(store: Datastore, ids: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> None:
    """Prints the longest match, its number of occurrences, and some of them in context."""
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
            raise DatastoreError(
                f"{store.path} is damaged; hf-refspec store info --verify says which file"
            )
        end = position + match.length
        before = shard.tokens[max(position - EXAMPLE_TOKENS, 0) : position]
        before = _in_document(before[::-1], shard)[::-1]
        after = _in_document(shard.tokens[end : end + EXAMPLE_TOKENS], shard)
        texts = (tokenizer.decode(part) for part in (before, ids[-match.length :], after))
        print("  …{}⟦{}⟧{}…".format(*(printable(text.replace("\n", "↵")) for text in texts)))


def _in_document(tokens: np.ndarray, shard: Any) -> np.ndarray:
    """The tokens up to the end of the document."""
    ends = np.flatnonzero(tokens == shard.separator)
    return tokens[: ends[0]] if len(ends) else tokens


def _print_tree(tree: DraftTree, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Prints one line per node, what it adds to the text `ids` and the nodes above it; children
    indented below their parent, most probable first."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents.tolist()):
        children.setdefault(parent, []).append(node)
    waiting = [(node, ids) for node in reversed(children.get(ROOT, []))]
    while waiting:
        node, path = waiting.pop()
        longer = [*path, int(tree.tokens[node])]
        known = tokenizer.decode(path).rstrip(PART_OF_CHARACTER)
        added = tokenizer.decode(longer)[len(known) :]
        print(f"{tree.probs[node]:6.3f} {'  ' * (len(longer) - len(ids))}{added!r}")
        waiting += [(child, longer) for child in reversed(children.get(node, []))]
