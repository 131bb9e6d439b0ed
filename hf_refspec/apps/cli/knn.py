"""`hf-refspec knn`: builds kNN datastores, and measures them on other texts."""

from __future__ import annotations

import random
from argparse import ArgumentParser, Namespace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ...ralm.interpolation import LEAST_TOKENS
from ...ralm.knn_datastore import KnnDatastore
from ...ralm.mixture import Mixture
from ...ralm.perplexity import read
from ...store.build.source import open_source
from ...store.fingerprint import vocabulary_size
from ...store.printable import printable
from ..shared.loading import load_model, load_tokenizer
from .answering import quieten_transformers
from .arguments import add_model, add_source, load_corpus
from .text_files import text_files

# What is held out of the texts: a tenth, and no more than is worth the time.
_HELD_OUT = 0.1
_MOST_CHARACTERS = 40_000
_LONGEST_LINE = 1000


def add_knn(parser: ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    about = "build a kNN datastore, and choose lambda and temperature on a tenth of the texts"
    build = commands.add_parser("build", help=about, description=about)
    build.set_defaults(run=_build)
    add_source(build)
    add_model(build)
    build.add_argument("--out", type=Path, required=True, help="the new folder")
    about = "the perplexity of texts: of the model alone, and with a kNN datastore"
    perplexity = commands.add_parser("perplexity", help=about, description=about)
    perplexity.set_defaults(run=_perplexity)
    perplexity.add_argument("store", metavar="FOLDER", help="a folder or a Hub id")
    add_source(perplexity)
    add_model(perplexity)  # the one that it was built with


def _build(args: Namespace) -> int:
    """Builds a kNN datastore, all of it or nothing, and prints what was chosen."""
    quieten_transformers()
    if args.out.exists():
        raise FileExistsError(f"--out {args.out} exists; choose another path, or delete it")
    tokenizer = load_tokenizer(args.model)
    texts, held_out = _hold_out(_texts(args, tokenizer))
    found = sum(max(len(tokenizer(text, verbose=False)["input_ids"]) - 1, 0) for text in held_out)
    if found < LEAST_TOKENS:
        raise ValueError(
            f"too little text to choose lambda on: {found} tokens are held out, and at least "
            f"{LEAST_TOKENS} are needed; give more text"
        )
    model = load_model(args.model, args.device_map, args.dtype)
    store = KnnDatastore.build(model, tokenizer, texts, args.out, held_out=held_out)
    chosen = store.config.interpolation
    assert chosen is not None
    print(args.out)
    print(f"  model       {printable(store.config.model)}, vocabulary {store.config.vocab_size:,}")
    print(f"  entries     {len(store):,} of {store.config.dimension} numbers")
    print(f"  chosen      {chosen}, on {chosen.tokens:,} held-out tokens")
    print(
        f"  perplexity  {chosen.perplexity_alone:.2f} alone, {chosen.perplexity:.2f} with the "
        "datastore, on these tokens"
    )
    return 0


def _perplexity(args: Namespace) -> int:
    """Prints the perplexity of the model alone and with the kNN datastore."""
    quieten_transformers()
    store = KnnDatastore.from_pretrained(args.store)
    mixture = Mixture(store, None, None, None)
    tokenizer = load_tokenizer(args.model)
    store.check_tokenizer(tokenizer)
    texts = _texts(args, tokenizer)
    model = load_model(args.model, args.device_map, args.dtype)
    found = read(model, tokenizer, texts, mixture)
    assert found.mixed is not None
    known = f"{100 * found.known / found.tokens:.0f} %"
    change = 100 * (found.mixed / found.alone - 1)
    print(f"text        {found.tokens:,} tokens, {known} stored with the same context")
    print(f"alone       {found.alone:.2f}")
    print(f"with kNN    {found.mixed:.2f} ({change:+.1f} %), {mixture}")
    return 0


def _texts(args: Namespace, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts that the arguments name."""
    documents, _, _ = load_corpus(args)
    source = text_files(args.source, args.pattern) if args.source else documents
    opened = open_source(source, tokenizer, vocabulary_size(tokenizer), args.column)
    return [text for text in opened.documents if isinstance(text, str)]


def _hold_out(texts: list[str]) -> tuple[list[str], list[str]]:
    """Divides texts into those to build from and those to choose on: whole texts, drawn with a
    fixed seed; and the end of the longest where the others are too long."""
    left = min(int(_HELD_OUT * sum(map(len, texts))), _MOST_CHARACTERS)
    least = left // 2
    order = random.Random(0).sample(range(len(texts)), len(texts))
    held = set()
    for i in order:
        if len(texts[i]) <= left:
            held.add(i)
            left -= len(texts[i])
    kept = [text for i, text in enumerate(texts) if i not in held]
    held_out = [texts[i] for i in sorted(held)]
    if left > least:
        longest = max(range(len(kept)), key=lambda i: len(kept[i]))
        end = len(kept[longest]) - left
        cut = kept[longest].rfind("\n", max(end - _LONGEST_LINE, 0), end) + 1 or end
        held_out.append(kept[longest][cut:])
        kept[longest] = kept[longest][:cut]
    return kept, held_out
