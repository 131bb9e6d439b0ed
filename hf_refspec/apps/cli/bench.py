"""`hf-refspec check`, `bench` and `store evaluate` measure, and `warmup` compiles before that."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...drafting.copied_spans import copied_spans
from ...drafting.datastore_drafts import DatastoreDrafts
from ...drafting.drafter import Drafter
from ...drafting.reference_copy import ReferenceCopy
from ...extras import require
from ...index.kernels import all_kernels, compile_all
from ...model_check import check as checked
from ...retrieval import bm25 as bm25  # these have kernels of their own
from ...retrieval import flat as flat
from ...store.build.source import open_source
from ...store.datastore import Datastore
from ...store.datastore_config import COLUMNS
from ...store.files import CONFIG, DatastoreError
from ...store.stored_tokenizer import vocabulary_size
from ...text_config import text_config
from ...transformers_names import keeps_state_in_modules
from ...version import __version__
from ...warm_up import warmup as warm_up
from ..bench.measure import (
    BY_NAME,
    LOOK_UP,
    LOOK_UP_TOKENS,
    OF_A_NAME,
    drafter_named,
    measure,
    plot_speed_ups,
    recorded_answers,
    replay,
)
from ..bench.prompts import Chat, read_chats, taking_turns
from ..shared.comparison import PLAIN, Comparison, Methods, new_table
from ..shared.live_drafts import Terminal
from ..shared.loading import load_config, load_model, load_tokenizer, name_for_people
from .arguments import add_model, draft_budget, positive

REPLAYED = (8, 16, 64)  # draft tokens
_BEGINNING, _LEAST = 64, 8  # tokens of a text that are a prompt
_MOST = 10_000  # texts that prompts are chosen from
# By the name of a method, a function that makes its drafters, and its draft budget.
Drafted: TypeAlias = dict[str, tuple[Callable[[], Drafter], int | str]]
_DEFAULT, _WITH_STORE = "default drafter", "with the datastore"


def add_check(parser: ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--context",
        type=positive,
        default=256,
        metavar="N",
        help="the length in tokens of the text that is timed",
    )


def check(args: Namespace) -> None:
    model = load_model(args.model, args.device_map, args.dtype)
    print(checked(model, args.context))


def add_bench(parser: ArgumentParser) -> None:
    parser.epilog = (
        "The file has a row for each prompt, in a column turns (as Spec-Bench and SPEED-Bench have "
        "it), messages, prompt, question or text; recorded answers in reference or answer, or "
        "among the messages."
    )
    add = parser.add_argument
    files = parser.add_mutually_exclusive_group(required=True)
    files.add_argument("--prompts", type=Path, metavar="FILE", help="JSON(L), CSV or Parquet")
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
        "with SessionDrafts",
    )
    help = "verified in one forward pass at most; auto by default"
    add("--max-draft-tokens", nargs="+", type=draft_budget, metavar="N", help=help)
    add("--limit", type=positive, metavar="N", help="only the first N chats; by default all")
    add("--turns", type=positive, metavar="N", help="only the first N turns; by default all")
    add("--max-new-tokens", type=positive, default=256, metavar="N", help="of an answer")
    add("--out", type=Path, metavar="FILE", help="write a plot too, for example speed_ups.png")


def bench(args: Namespace) -> int:
    """Returns 1 if ids differ in float32."""
    if args.out is not None:
        require("matplotlib", "--out", "bench")
    chats = taking_turns(read_chats(args.replay or args.prompts))[: args.limit]
    console = Terminal()
    if args.replay is not None:
        return _replay(args, chats, console)
    load_config(args.model)  # refuses anything but a language model
    tokenizer = load_tokenizer(args.model)
    new = {name: drafter_named(name, tokenizer) for name in args.drafters or ["auto"]}
    drafted: Drafted = {
        name if budget == "auto" else f"{name}, {budget} draft tokens": (new[name], budget)
        for name in new
        for budget in args.max_draft_tokens or ["auto"]
    }
    comparison = _compared(args, tokenizer, chats, args.turns, drafted, with_look_up=True)
    if args.out is not None:
        plot_speed_ups(comparison, args.out)
    return comparison.report(console)


def _compared(
    args: Namespace,
    tokenizer: PreTrainedTokenizerBase,
    chats: list[Chat],
    turns: int | None,
    drafted: Drafted,
    with_look_up: bool = False,
) -> Comparison:
    """Answers chats plainly and with drafters."""
    model = load_model(args.model, args.device_map, args.dtype)
    dtype = str(model.dtype).removeprefix("torch.")
    print(f"{name_for_people(args.model)} in {dtype} on {model.device}, {len(chats)} chats")

    def methods() -> Methods:
        found: dict[str, dict[str, Any]] = {PLAIN: {}}
        if with_look_up and not keeps_state_in_modules(model):  # transformers has none for these
            found[LOOK_UP] = {"prompt_lookup_num_tokens": LOOK_UP_TOKENS}
        for label, (new, budget) in drafted.items():
            found[label] = {"candidate_generator": new(), "max_draft_tokens": budget}
        return found

    comparison = Comparison(model, methods, do_sample=False)
    measure(comparison, tokenizer, chats, turns, args.max_new_tokens)
    return comparison


def _replay(args: Namespace, chats: list[Chat], console: Terminal) -> int:
    """Prints MAT for each drafter and number of draft tokens."""
    names = args.drafters or ["ReferenceCopy", "ReferenceCopy | SessionDrafts"]
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
    table, vocabulary = new_table("MAT, draft tokens:", *budgets), vocabulary_size(tokenizer)
    for name in names:
        new = drafter_named(name, tokenizer)
        stats = [replay(answers, new(), vocabulary, budget) for budget in budgets]
        table.add_row(name, *(f"{each.mat:.2f}" for each in stats))
    console.print(table)
    console.print(
        "MAT is how many times as fast drafts are where a pass over them takes no longer than a "
        "plain one: --prompts measures what it takes.",
        soft_wrap=True,
    )
    return 0


def add_evaluate(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("store", help="a folder or a Hub id")
    add(
        "texts",
        nargs="*",
        type=Path,
        help="files and folders of texts that are not in the datastore; the model continues their "
        f"first {_BEGINNING} tokens",
    )
    add("--prompts", type=Path, metavar="FILE", help="prompts instead, as hf-refspec bench has")
    add("--column", help="of files of rows, the column with texts or chats")
    add("--pattern", default="*", help='which files of a folder, for example "*.md"')
    add_model(parser)
    add("--limit", type=positive, default=12, metavar="N", help="the most prompts")
    add("--max-new-tokens", type=positive, default=96, metavar="N", help="of each answer")


def evaluate(args: Namespace) -> int:
    """Returns 1 if ids differ in float32."""
    if bool(args.texts) == (args.prompts is not None):
        raise ValueError("give one of: texts that are not in the datastore, --prompts FILE")
    tokenizer = load_tokenizer(args.model)
    store = Datastore.from_pretrained(args.store, tokenizer=tokenizer)
    vocab_size = text_config(load_config(args.model)).vocab_size
    DatastoreDrafts(store).check(vocab_size)
    if args.prompts is not None:
        chats = read_chats(args.prompts)[: args.limit]
    else:
        vocabulary = vocabulary_size(tokenizer)
        opened = open_source(args.texts, tokenizer, vocabulary, args.column, args.pattern)
        first = islice(opened.documents, _MOST)
        texts = [each[: 1 << 12] for each in first if isinstance(each, str)]
        chosen = texts[:: max(len(texts) // args.limit, 1)][: args.limit]
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in chosen]
        begun = [tokenizer.decode(each[:_BEGINNING]) for each in ids if len(each) >= _LEAST]
        chats = [Chat([text], [], is_text=True) for text in begun]
        if not chats:
            raise ValueError(f"no text has the {_LEAST} tokens that a prompt needs; give others")
    print(
        f"loading {args.model or 'the default model'}, to answer {len(chats)} prompts plainly, "
        f"with the default drafter, and with the {store.form} form of {args.store} too",
        flush=True,
    )
    auto = BY_NAME["auto"]
    drafted: Drafted = {
        _DEFAULT: (auto, "auto"),
        _WITH_STORE: (lambda: auto() | DatastoreDrafts(store), "auto"),
    }
    comparison = _compared(args, tokenizer, chats, 1, drafted)
    status = comparison.report(Terminal(), {_WITH_STORE: _DEFAULT})
    ids = [np.array(prompt, np.int32) for prompt in comparison.prompts]
    searched = [each[~np.isin(each, tokenizer.all_special_ids)] for each in ids]
    found = [copied_spans(0, text.tolist(), [(args.store, store.shards)]) for text in searched]
    lengths = [[span.end - span.start for span in spans] for spans in found]
    if held := sum(each == [len(text)] for each, text in zip(lengths, searched, strict=True)):
        print(f"{held} prompts are in the datastore itself: on other text it gains less")
    _record(args, store, comparison, held)
    return status


def _record(args: Namespace, store: Datastore, comparison: Comparison, held: int) -> None:
    """Writes into a datastore what drafts by look-up alone do for the answers of plain decoding,
    which is the same on every machine."""
    plain, dtype = comparison.calls[PLAIN], str(comparison.model.dtype).removeprefix("torch.")
    answers = list(zip(comparison.prompts, [call.ids for call in plain], strict=True))
    nodes, vocabulary = REPLAYED[-1], store.config.vocab_size
    drafters = ReferenceCopy(), ReferenceCopy() | DatastoreDrafts(store)
    without, mat = (round(replay(answers, each, vocabulary, nodes).mat, 2) for each in drafters)
    print(f"by look-up alone, {nodes} draft tokens: MAT {mat}, without the datastore {without}")
    names = ", ".join(path.resolve().name for path in args.texts or [args.prompts])
    among = f" ({held} of them are in it)" if held else ""
    prompts = f"{len(answers)} of {names:.99}{among}; {args.max_new_tokens} new tokens"
    model = f"{name_for_people(args.model)}, {dtype}"
    measured = f"{date.today()}, hf_refspec {__version__}"
    figures = store.form, prompts, model, nodes, without, mat, measured
    try:
        store.record(dict(zip(COLUMNS, figures, strict=True)))
        print(f"written into {store.path / CONFIG}, for the card")
    except (DatastoreError, OSError) as error:
        print(f"not written: {error}")


def add_warmup(parser: ArgumentParser) -> None:
    parser.epilog = (
        "Compiles the kernels that draft and search into numba's cache: beside the package, or in "
        "the folder that NUMBA_CACHE_DIR names. Run it as the user whose calls need them."
    )


def warmup(args: Namespace) -> None:
    start = time.perf_counter()
    warm_up()
    compile_all(all_kernels())
    print(f"{len(all_kernels())} kernels are compiled, in {time.perf_counter() - start:.1f} s")
