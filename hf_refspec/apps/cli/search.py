"""`hf-refspec store search`: a text's longest match in a datastore, and its draft tree."""

from argparse import ArgumentParser, Namespace

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...corpus.untrusted import printable
from ...index.rest_trie import all_matches
from ...messages import counted
from ...store.datastore import Datastore
from ..shared.streams import PART_OF_CHARACTER

_SEARCH_NODES = 24
_EXAMPLES = 3  # occurrences that a search shows
_EXAMPLE_TOKENS = 12  # before and after each


def add_search(parser: ArgumentParser) -> None:
    parser.add_argument("store", help="a folder or a Hub id")
    parser.add_argument("text", help="the text that the drafts continue")


def search(args: Namespace) -> None:
    from ...drafting.contract import Call
    from ...drafting.datastore_drafts import DatastoreDrafts  # loads torch

    store = Datastore.from_pretrained(args.store)
    tokenizer = store.load_tokenizer()

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    with store.naming_damage():
        ids = np.array(tokens(args.text), dtype=np.int64)
        if args.text[1:].endswith(" ") and tokens(f"{args.text}a")[: len(ids)] != ids.tolist():
            print("without the space at the end, which this tokenizer puts before the next word:")
            ids = np.array(tokens(args.text[:-1]), dtype=np.int64)
        if len(ids) == 0:
            raise ValueError("text has no tokens; give at least a word")
        if store.form == "full":
            _print_matches(store, ids, tokenizer)
        drafts = DatastoreDrafts(store)
        drafts.begin(ids, store.config.vocab_size)
        tree = drafts.draft(_SEARCH_NODES, Call())
        if len(tree) == 0:
            print("nothing to draft: the store has not enough to go by")
            return
        nodes = counted(len(tree), "node")
        print(f"the draft tree, {nodes}, each with the probability that it is accepted:")
        for node, depth in tree.walk():
            text = np.concatenate((ids, tree.path(node)))
            known = tokenizer.decode(text[:-1]).rstrip(PART_OF_CHARACTER)
            print(f"{tree.probs[node]:6.3f} {'  ' * depth}{tokenizer.decode(text)[len(known) :]!r}")


def _print_matches(store: Datastore, ids: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> None:
    """Prints the longest match, its number of occurrences, and some of them in context."""
    matches = all_matches(store.shards, ids.astype(np.int32), 1)
    if not matches:
        print("not even the last token occurs")
        return
    match = matches[0]
    words = tokenizer.decode(ids[-match.length :])
    last = "token" if match.length == 1 else f"{match.length} tokens"
    verb = "occurs" if match.length == 1 else "occur"
    print(f"the last {last}, {words!r}, {verb} {counted(match.count, 'time')}, such as:")
    examples = [
        (shard, index)
        for shard, (low, high) in zip(store.shards, match.ranges, strict=True)
        for index in range(low, min(high, low + _EXAMPLES))
    ]
    for shard, index in examples[:_EXAMPLES]:
        begin = int(shard.suffixes[index])
        end = begin + match.length
        low = max(begin - _EXAMPLE_TOKENS, 0)
        high = end + _EXAMPLE_TOKENS
        ends = np.flatnonzero(shard.tokens[low:high] == shard.separator) + low  # of documents
        low = max([low, *(ends[ends < begin] + 1)])
        high = min([high, *ends[ends >= end]])
        parts = shard.tokens[low:begin], ids[-match.length :], shard.tokens[end:high]
        texts = [printable(tokenizer.decode(part).replace("\n", "↵")) for part in parts]
        print(f"  …{texts[0]}⟦{texts[1]}⟧{texts[2]}…")
