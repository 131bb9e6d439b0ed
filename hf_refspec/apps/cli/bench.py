"""`hf-refspec bench`: measures whether drafts pay off for a model and prompts."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...corpus.tokenise import vocabulary_size
from ...drafting.stats import DraftStats
from ...messages import counted
from ...model_check import check as checked
from ...transformers_names import keeps_state_in_modules
from ..bench import measure
from ..bench.measure import ANSWERS, Chat, read_chats, rendered, taking_turns
from ..shared.comparison import FEWEST_PROMPTS, UNDRAFTED, Comparison, Methods, figure_table
from ..shared.loading import load_config, load_model, load_tokenizer, name_for_people
from ..shared.streams import Terminal
from .arguments import add_model, draft_budget, positive

REPLAYED = (8, 16, 64)  # draft tokens
# For each method a function that creates its drafters, and its draft budget.
Drafted: TypeAlias = dict[str, tuple[measure.New, int | str]]
EPILOG = (
    "The file has a row for each prompt, in a column turns (as in Spec-Bench and SPEED-Bench), "
    f"messages, prompt, question or text; recorded answers are in {', '.join(ANSWERS)} or among "
    "the messages."
)


def add_bench(parser: ArgumentParser) -> None:
    add = parser.add_argument
    files = parser.add_mutually_exclusive_group(required=True)
    files.add_argument("--prompts", type=Path, metavar="FILE", help="JSON(L), CSV or Parquet")
    help = "recorded chats: measure the MAT of drafts by look-up; with --model also what passes "
    help += "cost, and the speed-up to expect"
    files.add_argument("--replay", type=Path, metavar="FILE", help=help)
    add_model(parser)
    help = "with --replay: a folder or a Hub id of a tokenizer; no model is loaded"
    add("--tokenizer", metavar="NAME", help=help)
    help = ", ".join([*measure.BY_NAME, *measure.OF_A_NAME, *measure.OF_MODELS])
    help += ', or several of them, as in "ReferenceCopy | TokenRecycling"; by default auto, in a '
    help += "replay ReferenceCopy with and without SessionDrafts"
    add("--drafters", nargs="+", metavar="NAME", help=help)
    help = "at most this many in one forward pass; auto by default"
    add("--max-draft-tokens", nargs="+", type=draft_budget, metavar="N", help=help)
    add("--limit", type=positive, metavar="N", help="only the first N chats; by default all")
    add("--turns", type=positive, metavar="N", help="only the first N turns; by default all")
    add("--max-new-tokens", type=positive, default=256, metavar="N", help="of an answer")


def bench(args: Namespace) -> int:
    """Returns 1 if ids differ in float32."""
    chats = taking_turns(read_chats(args.replay or args.prompts, args.turns))
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
    return compared(args, tokenizer, chats, drafted, with_look_up=True).report(console)


def compared(
    args: Namespace,
    tokenizer: PreTrainedTokenizerBase,
    chats: list[Chat],
    drafted: Drafted,
    with_look_up: bool = False,
) -> Comparison:
    model = load_model(args.model, args.device_map, args.dtype)
    dtype = str(model.dtype).removeprefix("torch.")
    about = f"{name_for_people(args.model)} in {dtype} on {model.device}"
    about += f", {counted(len(chats), 'chat')}, {counted(measure.asked(chats), 'prompt')}"
    print(f"{about}; a verdict needs at least {FEWEST_PROMPTS}", flush=True)

    def methods() -> Methods:
        found: dict[str, dict[str, Any]] = {UNDRAFTED: {}}
        if with_look_up and not keeps_state_in_modules(model):  # transformers has none for these
            found[measure.LOOK_UP] = {"prompt_lookup_num_tokens": measure.LOOK_UP_TOKENS}
        for label, (new, budget) in drafted.items():
            found[label] = {"candidate_generator": new(model), "max_draft_tokens": budget}
        return found

    comparison = Comparison(model, methods, do_sample=False)
    measure.measure(comparison, tokenizer, chats, args.max_new_tokens)
    return comparison


def _replay(args: Namespace, chats: list[Chat], console: Terminal) -> int:
    names = args.drafters or ["ReferenceCopy", "ReferenceCopy | SessionDrafts"]
    of_models = ("TokenRecycling", "use_mtp", "assistant_model")
    for name in names:
        if name == "auto" or any(part in name for part in of_models):
            raise ValueError(f"--drafters {name} needs a model; with --replay name look-up alone")
    budgets = args.max_draft_tokens or REPLAYED
    if "auto" in budgets:
        raise ValueError("--max-draft-tokens auto is measured on a model; give --replay numbers")
    tokenizer = load_tokenizer(args.tokenizer or args.model)
    chats = rendered(chats, tokenizer, args.limit)
    new = {name: measure.drafter_named(name, tokenizer) for name in names}
    answers = measure.recorded_answers(chats, tokenizer)
    if not answers:
        where = f"in {', '.join(ANSWERS)} or among the messages"
        raise ValueError(f"--replay {args.replay} has no recorded answers {where}; add them")
    about = f"{counted(len(answers), 'recorded answer')} in the tokens of "
    about += name_for_people(args.tokenizer or args.model)
    if skipped := measure.asked(chats) - len(answers):
        about += f"; skipped {counted(skipped, 'prompt')} without a recorded answer"
    console.print(about, soft_wrap=True)
    vocabulary = vocabulary_size(tokenizer)
    table = figure_table("MAT, draft tokens:", *budgets)
    replayed: dict[tuple[str, int], DraftStats] = {}
    for name, new_drafter in new.items():
        for budget in budgets:
            replayed[name, budget] = measure.replay(answers, new_drafter(None), vocabulary, budget)
        table.add_row(name, *(f"{replayed[name, budget].mat:.2f}" for budget in budgets))
    console.print(table)
    if args.model is None:
        about = "MAT is the speed-up if passes over drafts take no longer than plain steps; "
        console.print(f"{about}--model measures how long they take.", soft_wrap=True)
        return 0
    found = checked(load_model(args.model, args.device_map, args.dtype))
    if not found.relative_costs:
        console.print(found.advice, soft_wrap=True)
        return 0
    sizes, costs = zip(*found.relative_costs.items(), strict=True)
    for (name, budget), stats in replayed.items():
        tokens = 1 + stats.drafted / stats.forward_passes
        cost = np.interp(tokens, sizes, costs)
        about = f"{name}, at most {budget} draft tokens: a pass has {tokens:.1f} tokens and costs "
        about += f"{cost:.2f} plain steps, MAT {stats.mat:.2f}: expect {stats.mat / cost:.1f}x"
        console.print(about, soft_wrap=True)
    return 0
