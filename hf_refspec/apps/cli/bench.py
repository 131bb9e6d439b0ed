"""`hf-refspec check`, `bench` and `store evaluate` measure, and `warmup` compiles before that."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import BatchEncoding, PreTrainedTokenizerBase

from ...drafting.blend import Blend
from ...drafting.datastore_drafts import DatastoreDrafts
from ...extras import require
from ...generation.check import check as checked
from ...generation.default_drafter import default_sources
from ...generation.warmup import warmup as warm_up
from ...index.kernels import all_kernels, compile_all
from ...retrieval import bm25 as bm25  # these have kernels of their own
from ...retrieval import flat as flat
from ...store.build.source import files_of
from ...store.datastore import Datastore
from ...store.stored_tokenizer import public_name, vocabulary_size
from ...transformers_names import keeps_state_in_modules
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
from ..shared.prompts import chat_inputs, text_inputs, tokens_left
from .arguments import add_model, draft_budget, positive, quieten_transformers

REPLAYED = (8, 16, 64)  # draft tokens
_BEGINNING, _LEAST = 64, 8  # tokens of a text that are a prompt
_DEFAULT, _WITH_STORE = "default drafter", "with the datastore"


def add_check(parser: ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--context",
        type=positive,
        default=256,
        help="the length in tokens of the text that is timed; 256 by default",
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


def bench(args: Namespace) -> int:
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
    warm_up()
    dtype = str(model.dtype).removeprefix("torch.")
    console.print(f"{public_name(model)} in {dtype} on {model.device}, {len(chats)} chats")

    def methods() -> Methods:
        found: dict[str, dict[str, Any]] = {PLAIN: {}}
        if not keeps_state_in_modules(model):  # transformers has no prompt look-up for these
            found[LOOK_UP] = {"prompt_lookup_num_tokens": LOOK_UP_TOKENS}
        for name, new in drafters.items():
            for budget in args.max_draft_tokens or ["auto"]:
                label = name if budget == "auto" else f"{name}, {budget} draft tokens"
                found[label] = {"candidate_generator": new(), "max_draft_tokens": budget}
        return found

    comparison = Comparison(model, methods, do_sample=False)
    measure(comparison, tokenizer, chats, args.turns, args.max_new_tokens)
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
    add("--pattern", default="*", help='which files of a folder, for example "*.md"')
    add_model(parser)
    add("--limit", type=positive, default=12, metavar="N", help="prompts; 12 by default")
    add("--max-new-tokens", type=positive, default=96, metavar="N", help="96 by default")


def evaluate(args: Namespace) -> int:
    """Returns 1 if ids differ in float32."""
    quieten_transformers()
    if bool(args.texts) == (args.prompts is not None):
        raise ValueError("give one of: texts that are not in the datastore, --prompts FILE")
    config = load_config(args.model)  # refuses anything but a language model
    tokenizer = load_tokenizer(args.model)
    store = Datastore.from_pretrained(args.store, tokenizer=tokenizer)
    prompts = _prompts(args, tokenizer)
    console = Terminal()
    console.print(
        f"loading {args.model or 'the default model'}, to answer {len(prompts)} prompts plainly, "
        f"with the default drafter, and with the {store.form} form of {args.store} too",
        soft_wrap=True,
    )
    model = load_model(args.model, args.device_map, args.dtype)
    warm_up()

    def methods() -> Methods:
        with_store = Blend([*default_sources(), DatastoreDrafts(store)])
        return {
            PLAIN: {},
            _DEFAULT: {"candidate_generator": Blend(default_sources())},
            _WITH_STORE: {"candidate_generator": with_store},
        }

    comparison = Comparison(model, methods, do_sample=False)
    comparison.warm_up()
    for inputs in tqdm(prompts, "prompts", leave=False, disable=None):
        hint = "leave it out"
        left = tokens_left(inputs, config, "a prompt", hint, args.max_new_tokens)
        comparison.ask(inputs.to(model.device), max_new_tokens=left)
    console.print(f"{public_name(model)} in {str(model.dtype).removeprefix('torch.')}")
    status = comparison.report(console, {_WITH_STORE: _DEFAULT})
    texts = [inputs["input_ids"][0].numpy().astype(np.int32) for inputs in prompts]
    texts = [ids[~np.isin(ids, tokenizer.all_special_ids)] for ids in texts]
    if held := sum(any(shard.holds(ids) for shard in store.shards) for ids in texts):
        print(f"{held} prompts are in the datastore itself: on other text it gains less")
    return status


def _prompts(args: Namespace, tokenizer: PreTrainedTokenizerBase) -> list[BatchEncoding]:
    """The prompts of a file, or the beginnings of texts."""
    if args.prompts is not None:
        chats = read_chats(args.prompts)[: args.limit]
        return [chat_inputs(tokenizer, chat.until(0, [])) for chat in chats]
    files = [file for path in args.texts for file in files_of(path, args.pattern)]
    chosen = files[:: max(len(files) // args.limit, 1)][: args.limit]
    texts = [file.read_text(encoding="utf-8", errors="replace")[: 1 << 12] for file in chosen]
    prompts = [
        BatchEncoding({name: ids[:, :_BEGINNING] for name, ids in inputs.items()})
        for inputs in (text_inputs(tokenizer, text) for text in texts)
        if inputs["input_ids"].shape[1] >= _LEAST
    ]
    if not prompts:
        raise ValueError(f"no text has the {_LEAST} tokens that a prompt needs; give others")
    return prompts


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
