"""`hf-refspec check`, `bench` and `store evaluate` measure; `warmup` compiles kernels ahead."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from ...corpus.documents import open_source
from ...drafting.contract import Drafter
from ...drafting.copied_spans import copied_spans
from ...drafting.datastore_drafts import DatastoreDrafts
from ...drafting.reference_copy import ReferenceCopy
from ...drafting.stats import DraftStats
from ...kernels.kernel import all_kernels, compile_all, jit_is_disabled
from ...messages import counted, require
from ...model_check import check as checked
from ...retrieval import bm25 as bm25  # these have kernels of their own
from ...retrieval import flat as flat
from ...store.datastore import Datastore
from ...store.datastore_config import COLUMNS
from ...store.files import CONFIG, DatastoreError
from ...store.stored_tokenizer import vocabulary_size
from ...text_config import text_config
from ...transformers_names import keeps_state_in_modules
from ...version import __version__
from ...warm_up import warmup as warm_up
from ..bench import measure
from ..bench.prompts import ANSWERS, Chat, read_chats, rendered, taking_turns
from ..shared.comparison import FEWEST_PROMPTS, UNDRAFTED, Comparison, Methods, figure_table
from ..shared.live_drafts import Terminal
from ..shared.loading import load_config, load_model, load_tokenizer, name_for_people
from .arguments import add_model, check_sources, draft_budget, positive

REPLAYED = (8, 16, 64)  # draft tokens
_PROMPT_TOKENS = 64  # the beginning of a text that is a prompt
_SHORTEST_PROMPT = 8  # tokens
_TEXTS = 10_000  # prompts are chosen from the first of a corpus
# For each method a function that creates its drafters, and its draft budget.
Drafted: TypeAlias = dict[str, tuple[Callable[[], Drafter], int | str]]
_DEFAULT = "default drafter"
_WITH_STORE = "with the datastore"


def add_check(parser: ArgumentParser) -> None:
    add_model(parser)
    help = "tokens of context in the timed forward passes"
    parser.add_argument("--context", type=positive, default=256, metavar="N", help=help)


def check(args: Namespace) -> None:
    print(checked(load_model(args.model, args.device_map, args.dtype), args.context))


def add_bench(parser: ArgumentParser) -> None:
    parser.epilog = (
        "The file has a row for each prompt, in a column turns (as in Spec-Bench and SPEED-Bench), "
        "messages, prompt, question or text; recorded answers are in reference or answer, or among "
        "the messages."
    )
    add = parser.add_argument
    files = parser.add_mutually_exclusive_group(required=True)
    files.add_argument("--prompts", type=Path, metavar="FILE", help="JSON(L), CSV or Parquet")
    help = "recorded chats: measure the MAT of drafts by look-up; with --model also what passes "
    help += "cost, and the speed-up to expect"
    files.add_argument("--replay", type=Path, metavar="FILE", help=help)
    add_model(parser)
    help = "with --replay: a folder or a Hub id of a tokenizer; no model is loaded"
    add("--tokenizer", metavar="NAME", help=help)
    help = ", ".join([*measure.BY_NAME, *measure.OF_A_NAME])
    help += ', or several of them, as in "ReferenceCopy | TokenRecycling"; by default auto, in a '
    help += "replay ReferenceCopy with and without SessionDrafts"
    add("--drafters", nargs="+", metavar="NAME", help=help)
    help = "at most this many in one forward pass; auto by default"
    add("--max-draft-tokens", nargs="+", type=draft_budget, metavar="N", help=help)
    add("--limit", type=positive, metavar="N", help="only the first N chats; by default all")
    add("--turns", type=positive, metavar="N", help="only the first N turns; by default all")
    add("--max-new-tokens", type=positive, default=256, metavar="N", help="of an answer")
    add("--out", type=Path, metavar="FILE", help="write a plot too, for example speed_ups.png")


def bench(args: Namespace) -> int:
    """Returns 1 if ids differ in float32."""
    if args.tokenizer and (args.replay is None or args.model):
        raise ValueError(f"--tokenizer {args.tokenizer} is for --replay without --model")
    if args.out is not None:
        require("matplotlib", "--out", "bench")
        if not args.out.parent.is_dir():
            parent = args.out.parent
            raise ValueError(f"--out {args.out} cannot be written: {parent} is not a folder")
    chats = taking_turns(read_chats(args.replay or args.prompts))
    console = Terminal()
    if args.replay is not None:
        return _replay(args, chats, console)
    load_config(args.model)  # refuses anything but a language model
    tokenizer = load_tokenizer(args.model)
    chats = rendered(chats, tokenizer, args.limit)
    new = {name: measure.drafter_named(name, tokenizer) for name in args.drafters or ["auto"]}
    drafted: Drafted = {
        name if budget == "auto" else f"{name}, {budget} draft tokens": (new_drafter, budget)
        for name, new_drafter in new.items()
        for budget in args.max_draft_tokens or ["auto"]
    }
    comparison = _compared(args, tokenizer, chats, args.turns, drafted, with_look_up=True)
    status = comparison.report(console)
    if args.out is not None:
        measure.plot_speed_ups(comparison, args.out)
    return status


def _compared(
    args: Namespace,
    tokenizer: PreTrainedTokenizerBase,
    chats: list[Chat],
    turns: int | None,
    drafted: Drafted,
    with_look_up: bool = False,
) -> Comparison:
    model = load_model(args.model, args.device_map, args.dtype)
    dtype = str(model.dtype).removeprefix("torch.")
    about = f"{name_for_people(args.model)} in {dtype} on {model.device}"
    about += f", {counted(len(chats), 'chat')}, {counted(measure.asked(chats, turns), 'prompt')}"
    print(f"{about}; a verdict needs at least {FEWEST_PROMPTS}", flush=True)

    def methods() -> Methods:
        found: dict[str, dict[str, Any]] = {UNDRAFTED: {}}
        if with_look_up and not keeps_state_in_modules(model):  # transformers has none for these
            found[measure.LOOK_UP] = {"prompt_lookup_num_tokens": measure.LOOK_UP_TOKENS}
        for label, (new, budget) in drafted.items():
            found[label] = {"candidate_generator": new(), "max_draft_tokens": budget}
        return found

    comparison = Comparison(model, methods, do_sample=False)
    measure.measure(comparison, tokenizer, chats, turns, args.max_new_tokens)
    return comparison


def _replay(args: Namespace, chats: list[Chat], console: Terminal) -> int:
    names = args.drafters or ["ReferenceCopy", "ReferenceCopy | SessionDrafts"]
    for name in names:
        if name == "auto" or "Recycling" in name or "DraftModel" in name:
            raise ValueError(f"--drafters {name} needs a model; with --replay name look-up alone")
    budgets = args.max_draft_tokens or REPLAYED
    if "auto" in budgets:
        raise ValueError("--max-draft-tokens auto is measured on a model; give --replay numbers")
    name_of_tokenizer = args.tokenizer or args.model
    tokenizer = load_tokenizer(name_of_tokenizer)
    chats = rendered(chats, tokenizer, args.limit)
    new = {name: measure.drafter_named(name, tokenizer) for name in names}
    answers = measure.recorded_answers(chats, tokenizer, args.turns)
    if not answers:
        where = f"in {', '.join(ANSWERS)} or among the messages"
        raise ValueError(f"--replay {args.replay} has no recorded answers {where}; add them")
    about = f"{counted(len(answers), 'recorded answer')} in the tokens of "
    about += name_for_people(name_of_tokenizer)
    if skipped := measure.asked(chats, args.turns) - len(answers):
        about += f"; skipped {counted(skipped, 'prompt')} without a recorded answer"
    console.print(about, soft_wrap=True)
    vocabulary = vocabulary_size(tokenizer)
    table = figure_table("MAT, draft tokens:", *budgets)
    replayed: dict[tuple[str, int], DraftStats] = {}
    for name, new_drafter in new.items():
        for budget in budgets:
            replayed[name, budget] = measure.replay(answers, new_drafter(), vocabulary, budget)
        table.add_row(name, *(f"{replayed[name, budget].mat:.2f}" for budget in budgets))
    console.print(table)
    if args.model is None:
        about = "MAT is the speed-up if passes over drafts take no longer than plain steps; "
        console.print(f"{about}--model measures how long they take.", soft_wrap=True)
        return 0
    found = checked(load_model(args.model, args.device_map, args.dtype))
    for (name, budget), stats in replayed.items():
        tokens = 1 + stats.drafted / stats.forward_passes
        if (cost := found.cost(tokens)) is None:
            console.print(found.advice, soft_wrap=True)
            break
        about = f"{name}, at most {budget} draft tokens: a pass has {tokens:.1f} tokens and costs "
        about += f"{cost:.2f} plain steps, MAT {stats.mat:.2f}: expect {stats.mat / cost:.1f}x"
        console.print(about, soft_wrap=True)
    return 0


def add_evaluate(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("store", help="a folder or a Hub id")
    help = "files and folders of texts that are not in the datastore; the model continues their "
    add("texts", nargs="*", type=Path, help=f"{help}first {_PROMPT_TOKENS} tokens")
    add("--prompts", type=Path, metavar="FILE", help="prompts instead, as for hf-refspec bench")
    add("--column", help="the column with texts or chats, in files of rows")
    add("--pattern", default="*", help='which files of a folder, for example "*.md"')
    add_model(parser)
    add("--limit", type=positive, default=12, metavar="N", help="at most N prompts")
    add("--max-new-tokens", type=positive, default=96, metavar="N", help="of each answer")


def evaluate(args: Namespace) -> int:
    """Returns 1 if ids differ in float32."""
    if bool(args.texts) == (args.prompts is not None):
        raise ValueError("give one of: texts that are not in the datastore, --prompts FILE")
    check_sources(args.texts)
    tokenizer = load_tokenizer(args.model)
    store = Datastore.from_pretrained(args.store, tokenizer=tokenizer)
    vocab_size = text_config(load_config(args.model)).vocab_size
    DatastoreDrafts(store).check(vocab_size)
    if args.prompts is not None:
        chats = rendered(read_chats(args.prompts), tokenizer, args.limit)
    else:
        vocabulary = vocabulary_size(tokenizer)
        opened = open_source(args.texts, tokenizer, vocabulary, args.column, args.pattern)
        first = islice(opened.documents, _TEXTS)
        texts = [text[: 1 << 12] for text in first if isinstance(text, str)]
        chosen = texts[:: max(len(texts) // args.limit, 1)][: args.limit]
        tokenized = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in chosen]
        prompts = [ids[:_PROMPT_TOKENS] for ids in tokenized if len(ids) >= _SHORTEST_PROMPT]
        chats = [Chat([tokenizer.decode(ids)], [], is_text=True) for ids in prompts]
        if not chats:
            why = f"no text has the {_SHORTEST_PROMPT} tokens that a prompt needs"
            raise ValueError(f"{why}; give others")
    asked = counted(len(chats), "prompt")
    about = f"loading {args.model or 'the default model'} to answer {asked} plainly, "
    about += f"with the default drafter, and with the {store.form} form of {args.store}"
    print(about, flush=True)
    auto = measure.BY_NAME["auto"]
    drafted: Drafted = {
        _DEFAULT: (auto, "auto"),
        _WITH_STORE: (lambda: auto() | DatastoreDrafts(store), "auto"),
    }
    comparison = _compared(args, tokenizer, chats, 1, drafted)
    status = comparison.report(Terminal(), {_WITH_STORE: _DEFAULT})
    held = 0  # prompts that stand whole in the datastore
    for prompt in comparison.prompts:
        ids = [token for token in prompt if token not in tokenizer.all_special_ids]
        spans = copied_spans(0, ids, [(args.store, store.shards)])
        held += [(span.start, span.end) for span in spans] == [(0, len(ids))]
    if held:
        among = f"{held} of {counted(len(comparison.prompts), 'prompt')}"
        print(f"the datastore itself holds {among}: it gains less on other texts")
    _record(args, store, comparison, held)
    return status


def _record(args: Namespace, store: Datastore, comparison: Comparison, held: int) -> None:
    """Writes look-up's MAT over plain decoding's answers into a datastore."""
    ids = [call.ids for call in comparison.calls[UNDRAFTED]]
    answers = list(zip(comparison.prompts, ids, strict=True))
    nodes = REPLAYED[-1]

    def mat(drafter: Drafter) -> float:
        return round(measure.replay(answers, drafter, store.config.vocab_size, nodes).mat, 2)

    without = mat(ReferenceCopy())
    with_store = mat(ReferenceCopy() | DatastoreDrafts(store))
    mats = f"MAT {with_store}, without the datastore {without}"
    print(f"by look-up alone, {nodes} draft tokens: {mats}")
    names = ", ".join(path.resolve().name for path in args.texts or [args.prompts])
    among = f" ({held} in it)" if held else ""
    prompts = f"{len(answers)} of {names:.99}{among}; {counted(args.max_new_tokens, 'new token')}"
    dtype = str(comparison.model.dtype).removeprefix("torch.")
    model = f"{name_for_people(args.model)}, {dtype}"
    measured = f"{date.today()}, hf_refspec {__version__}"
    gain = comparison.gain(_WITH_STORE, _DEFAULT)
    speed_up = gain.spread if gain.drafts_help else "none, MAT 1.00"
    if gain.prompts < FEWEST_PROMPTS:
        speed_up = "not enough to say"
    figures = store.form, prompts, model, nodes, without, with_store, speed_up, measured
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
    if jit_is_disabled():
        raise ValueError("NUMBA_DISABLE_JIT is set, so numba compiles nothing; unset it")
    start = time.perf_counter()
    warm_up()
    compile_all(all_kernels())
    print(f"{len(all_kernels())} kernels are compiled, in {time.perf_counter() - start:.1f} s")
