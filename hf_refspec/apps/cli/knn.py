"""`hf-refspec knn`: kNN datastores are built, and measured on texts they were not built from."""

from __future__ import annotations

import random
import sys
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
from ..shared.default_model import HUB_ID, load_model, load_tokenizer
from .answering import quieten_transformers
from .arguments import add_source, load_dataset, positive
from .text_files import text_files

# What is held out of the texts: a tenth, and no more than is worth the time.
_HELD_OUT = 0.1
_MOST_CHARACTERS = 40_000
_LONGEST_LINE = 1000
# The fraction of tokens with an entry at distance zero that no text has by chance.
_KNOWN = 0.1


def add_knn(parser: ArgumentParser) -> None:
    """Adds the arguments of `hf-refspec knn build` and `hf-refspec knn perplexity`."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    about = "build a kNN datastore, and choose lambda and temperature on text that is held out"
    build = commands.add_parser("build", help=about, description=about)
    build.set_defaults(run=_build)
    add_source(build)
    add = build.add_argument
    add("--model", help=f"a folder or a Hub id; default: {HUB_ID}")
    add("--out", type=Path, required=True, help="the new folder")
    add(
        "--held-out",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="texts to choose on, files and folders; by default about a tenth of the texts, "
        "which then do not get into the datastore",
    )
    about = "the perplexity of texts: of the model alone, and with a kNN datastore"
    perplexity = commands.add_parser("perplexity", help=about, description=about)
    perplexity.set_defaults(run=_perplexity)
    add = perplexity.add_argument
    add("knn_datastore", metavar="FOLDER", help="a kNN datastore: a folder or a Hub id")
    add_source(perplexity)
    add("--model", help=f"the one that it was built with; default: {HUB_ID}")
    add("--k", type=positive, metavar="N", help="neighbours; by default as chosen")
    add("--lambda", dest="lambda_", type=float, metavar="X", help="by default as chosen")
    add("--temperature", type=float, metavar="X", help="by default as chosen")


def _build(args: Namespace) -> int:
    """Builds a kNN datastore, all of it or nothing, and prints what was chosen."""
    quieten_transformers()
    if args.out.exists():
        raise FileExistsError(f"--out {args.out} exists; choose another path, or delete it")
    tokenizer = load_tokenizer(args.model)
    texts = _texts(args, tokenizer)
    if args.held_out is None:
        texts, held_out = _hold_out(texts)
        remedy = "give more text, or --held-out FILE"
    else:
        held_out = _read_files(args.held_out, args.pattern, tokenizer)
        if not set(texts).isdisjoint(held_out):
            raise ValueError(
                "--held-out has a text that the datastore is built from as well: lambda would be "
                "chosen on what is known already; give others"
            )
        remedy = "give --held-out more text"
    found = sum(max(len(tokenizer(text, verbose=False)["input_ids"]) - 1, 0) for text in held_out)
    if found < LEAST_TOKENS:
        raise ValueError(
            f"too little text to choose lambda on: {found} tokens are held out, and at least "
            f"{LEAST_TOKENS} are needed; {remedy}"
        )
    model = load_model(args.model)
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
    if not any(chosen.lambdas):
        print("  The neighbours do not help on the held-out text: lambda is 0.")
    return 0


def _perplexity(args: Namespace) -> int:
    """Prints the perplexity of the model alone and with the kNN datastore."""
    quieten_transformers()
    store = KnnDatastore.from_pretrained(args.knn_datastore)
    mixture = Mixture(store, args.k, args.lambda_, args.temperature)
    tokenizer = load_tokenizer(args.model)
    store.check_tokenizer(tokenizer)
    texts = _texts(args, tokenizer)
    found = read(load_model(args.model), tokenizer, texts, mixture)
    assert found.mixed is not None
    change = 100 * (found.mixed / found.alone - 1)
    print(f"text        {found.tokens:,} tokens, {100 * found.known / found.tokens:.0f} % known")
    print(f"alone       {found.alone:.2f}")
    print(f"with kNN    {found.mixed:.2f} ({change:+.1f} %), {mixture}")
    if found.known > _KNOWN * found.tokens:
        print(
            f"hf-refspec: {100 * found.known / found.tokens:.0f} % of the tokens are in the "
            "datastore with all that comes before them: this perplexity is none of held-out text",
            file=sys.stderr,
        )
    return 0


def _texts(args: Namespace, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts that the arguments name."""
    if bool(args.source) == (args.dataset is not None):
        raise ValueError("give one of: files or folders, --dataset NAME")
    if args.source:
        if args.column is not None:
            raise ValueError(f"--column {args.column} is for --dataset; leave it out")
        return _read_files(args.source, args.pattern, tokenizer)
    dataset = load_dataset(args)
    opened = open_source(dataset, tokenizer, vocabulary_size(tokenizer), args.column)
    return [text for text in opened.documents if isinstance(text, str)]


def _read_files(paths: list[Path], pattern: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    opened = open_source(text_files(paths, pattern), tokenizer, vocabulary_size(tokenizer))
    return [text for text in opened.documents if isinstance(text, str)]


def _hold_out(texts: list[str]) -> tuple[list[str], list[str]]:
    """Divides texts into those to build from and those to choose on: whole texts at random, but
    always the same; and of the longest its end, where no others are short enough."""
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
