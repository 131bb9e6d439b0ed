"""`hf-refspec evaluate`: whether a datastore pays for a model and a kind of text."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...store.datastore import Datastore
from ...store.fingerprint import public_name
from ..bench.measure import IdsDifferError
from ..bench.report import methods_table
from ..shared.loading import load_config, load_model, load_tokenizer
from ..shared.prompts import question_inputs
from .answering import quieten_transformers, read_text
from .arguments import add_model, positive
from .evaluation import FEWEST_PROMPTS, Evaluation, evaluate
from .text_files import text_files

_BEGINNING, _LEAST = 64, 8  # tokens of a text that are a prompt
_NEW_TOKENS = 96
_STEP = 100  # of a datastore's documents at most every 100th is taken, as skipping takes time


def add_evaluate(parser: ArgumentParser) -> None:
    """Adds the arguments of `hf-refspec evaluate`."""
    parser.set_defaults(run=_evaluate)
    add = parser.add_argument
    add("store", help="a folder or a Hub id")
    add(
        "texts",
        nargs="*",
        type=Path,
        help="files and folders of texts that are not in the datastore; the model continues their "
        f"first {_BEGINNING} tokens",
    )
    add("--prompts", type=Path, metavar="FILE", help="a prompt on each line, in place of texts")
    add("--pattern", default="*", help='which files of a folder, for example "*.md"')
    add_model(parser)
    add("--limit", type=positive, default=12, metavar="N", help="so many prompts; 12 by default")


def _evaluate(args: Namespace) -> int:
    """Returns 1 if ids differed."""
    quieten_transformers()
    if args.texts and args.prompts is not None:
        raise ValueError(f"give texts or --prompts {args.prompts}, not both")
    texts = _texts(args)
    load_config(args.model)  # refuses anything but a language model
    tokenizer = load_tokenizer(args.model)
    store = Datastore.from_pretrained(args.store, tokenizer=tokenizer)
    prompts, origin = _prompts(args, texts, store, tokenizer)
    special = set(tokenizer.all_special_ids)
    held = sum(_is_held([i for i in ids if i not in special], store) for ids in prompts.values())
    model = load_model(args.model, args.device_map, args.dtype)
    print(
        f"{public_name(model)} in {str(model.dtype).removeprefix('torch.')}, the {store.form} form "
        f"of {args.store}, {len(prompts)} prompts: {origin}",
        flush=True,
    )
    if len(prompts) < FEWEST_PROMPTS:
        print(f"note: {FEWEST_PROMPTS} prompts are needed to say whether it pays", flush=True)
    try:
        evaluation = evaluate(model, tokenizer, store, prompts, _NEW_TOKENS)
    except IdsDifferError as error:
        print(f"IDS DIFFER: {error}")
        return 1
    _print(evaluation)
    if held:
        print(
            f"{held} of the prompts are beginnings of texts in the datastore itself: on other text "
            "it gains less"
        )
    print(evaluation.gain)
    return 0


def _texts(args: Namespace) -> dict[str, str]:
    """The prompts or texts that were given, by name."""
    if args.prompts is not None:
        lines = read_text(args.prompts, "--prompts").splitlines()
        numbered = ((f"line {i}", line) for i, line in enumerate(lines, 1) if line.strip())
        return dict(islice(numbered, args.limit))
    if not args.texts:
        return {}
    files = text_files(args.texts, args.pattern)
    chosen = files[:: max(len(files) // args.limit, 1)][: args.limit]
    return {str(file): file.read_text(encoding="utf-8", errors="replace") for file in chosen}


def _prompts(
    args: Namespace, texts: dict[str, str], store: Datastore, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, list[int]], str]:
    """The ids of the prompts by name, and where they come from."""
    if args.prompts is not None:
        asked = {name: question_inputs(tokenizer, text) for name, text in texts.items()}
        ids = {name: inputs["input_ids"][0].tolist() for name, inputs in asked.items()}
        return ids, str(args.prompts)
    if texts:
        ids = {name: tokenizer(text[: 1 << 12])["input_ids"] for name, text in texts.items()}
        origin = "beginnings of texts"
    else:
        ids = _held_documents(store, args.limit)
        origin = "beginnings of the datastore's own documents"
    prompts = {name: each[:_BEGINNING] for name, each in ids.items() if len(each) >= _LEAST}
    if not prompts:
        raise ValueError(f"no text has the {_LEAST} tokens that a prompt needs; give others")
    return prompts, origin


def _held_documents(store: Datastore, limit: int) -> dict[str, list[int]]:
    if store.form != "full":
        raise ValueError(
            "the compact form has no documents to take prompts from; give texts or --prompts FILE"
        )
    step = min(max(store.documents // limit, 1), _STEP)
    chosen = islice(store.iter_documents(), 0, step * limit, step)
    return {f"document {i * step}": ids.tolist() for i, ids in enumerate(chosen)}


def _is_held(ids: list[int], store: Datastore) -> bool:
    """Whether the full form of a datastore contains a prompt."""
    run = np.array(ids, dtype=np.int32)
    return any(shard.holds(run) for shard in store.shards)


def _print(evaluation: Evaluation) -> None:
    for reason in evaluation.skipped:
        print(f"left out: {reason}", file=sys.stderr)
    print(methods_table(evaluation.summaries))
    for name, stats in evaluation.stats.items():
        counts = ", ".join(
            f"{source.name} {source.accepted:,} ({source.first:,} first)"
            for source in stats.sources
        )
        print(f"accepted tokens, {name}: {counts}")
