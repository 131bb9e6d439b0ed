"""`hf-refspec check` and `bench`: what drafts of a model cost, and whether they pay for prompts."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ...extras import require
from ...generation.check import check
from ...generation.warmup import warmup
from ...store.stored_tokenizer import public_name, vocabulary_size
from ..bench.drafters import BY_NAME, OF_A_NAME, drafter_named
from ..bench.measure import measure, recorded_answers, replay
from ..bench.plot import plot_speed_ups
from ..bench.prompts import Chat, read_chats, taking_turns
from ..shared.console import Terminal
from ..shared.loading import load_config, load_model, load_tokenizer, name_for_people
from .answering import quieten_transformers
from .arguments import add_model, draft_budget, positive

REPLAYED = (8, 16, 64)  # draft tokens


def add_check(parser: ArgumentParser) -> None:
    parser.set_defaults(run=_check)
    add_model(parser)
    parser.add_argument(
        "--context",
        type=positive,
        default=256,
        help="the length in tokens of the text that is timed; 256 by default",
    )


def _check(args: Namespace) -> int:
    model = load_model(args.model, args.device_map, args.dtype)
    print(check(model, args.context))
    return 0


def add_bench(parser: ArgumentParser) -> None:
    """Adds the arguments of `hf-refspec bench`."""
    parser.set_defaults(run=_bench)
    parser.epilog = (
        "The file has a row for each prompt, in a column turns (as Spec-Bench and SPEED-Bench have "
        "it), messages, prompt, question or text; recorded answers in reference or answer, or "
        "among the messages."
    )
    add = parser.add_argument
    files = parser.add_mutually_exclusive_group(required=True)
    files.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines or Parquet")
    files.add_argument(
        "--replay",
        type=Path,
        metavar="FILE",
        help="recorded chats: the MAT of drafts by look-up, without a model",
    )
    add_model(parser)
    add(
        "--drafters",
        nargs="+",
        metavar="NAME",
        help=f"{', '.join([*BY_NAME, *OF_A_NAME])}, or several of them, as in "
        '"ReferenceCopy | TokenRecycling"; auto by default, in a replay ReferenceCopy alone and '
        "with RetrievalCache",
    )
    add("--max-draft-tokens", nargs="+", type=draft_budget, metavar="N", help="auto by default")
    add("--limit", type=positive, metavar="N", help="only the first N chats; by default all")
    add("--turns", type=positive, metavar="N", help="only the first N turns; by default all")
    add("--max-new-tokens", type=positive, default=256, metavar="N", help="256 by default")
    add("--out", type=Path, metavar="FILE", help="write a plot too, for example speed_ups.png")


def _bench(args: Namespace) -> int:
    """Returns 1 if ids differ in float32."""
    quieten_transformers()
    if args.out is not None:
        require("matplotlib", "--out", "bench")
    chats = taking_turns(read_chats(args.replay or args.prompts))[: args.limit]
    console = Terminal()
    if args.replay is not None:
        return _replay(args, chats, console)
    load_config(args.model)  # refuses anything but a language model
    tokenizer = load_tokenizer(args.model)
    drafters = {name: drafter_named(name, tokenizer) for name in args.drafters or ["auto"]}
    model = load_model(args.model, args.device_map, args.dtype)
    warmup()
    dtype = str(model.dtype).removeprefix("torch.")
    console.print(f"{public_name(model)} in {dtype} on {model.device}, {len(chats)} chats")
    budgets = args.max_draft_tokens or ["auto"]
    comparison = measure(
        model, tokenizer, chats, drafters, budgets, args.turns, args.max_new_tokens
    )
    if args.out is not None:
        plot_speed_ups(comparison, args.out)
    return comparison.report(console)


def _replay(args: Namespace, chats: list[Chat], console: Terminal) -> int:
    """Prints MAT for each drafter and number of draft tokens."""
    names = args.drafters or ["ReferenceCopy", "ReferenceCopy | RetrievalCache"]
    for name in names:
        if name == "auto" or "Recycling" in name or "DraftModel" in name:
            raise ValueError(f"--drafters {name} needs a model; with --replay name look-up alone")
    budgets = args.max_draft_tokens or REPLAYED
    if "auto" in budgets:
        raise ValueError("--max-draft-tokens auto is measured on a model; with --replay name some")
    tokenizer = load_tokenizer(args.model)
    answers = recorded_answers(chats, tokenizer, args.turns)
    if not answers:
        raise ValueError(f"--replay {args.replay} has no recorded answers")
    console.print(f"{len(answers)} recorded answers in the tokens of {name_for_people(args.model)}")
    table = Table(box=SIMPLE_HEAD)
    table.add_column("MAT, draft tokens:", overflow="fold")
    for budget in budgets:
        table.add_column(str(budget), justify="right")
    for name in names:
        new = drafter_named(name, tokenizer)
        vocabulary = vocabulary_size(tokenizer)
        stats = [replay(answers, new(), vocabulary, budget) for budget in budgets]
        table.add_row(name, *(f"{each.mat:.2f}" for each in stats))
    console.print(table)
    console.print(
        "MAT is how many times as fast drafts are where a pass over them takes no longer than a "
        "plain one: --prompts measures what it takes.",
        soft_wrap=True,
    )
    return 0
