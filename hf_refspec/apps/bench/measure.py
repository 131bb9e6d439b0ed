"""Measures a model's answers with and without drafts, or replays recorded answers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial, reduce
from math import ceil
from operator import or_
from pathlib import Path
from textwrap import fill
from time import perf_counter

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...corpus.untrusted import one_line
from ...drafting.auto import default_sources
from ...drafting.blend import Blend
from ...drafting.contract import Call, Drafter, Observation
from ...drafting.datastore_drafts import DatastoreDrafts
from ...drafting.draft_model import DraftModel
from ...drafting.reference_copy import ReferenceCopy
from ...drafting.session_drafts import SessionDrafts
from ...drafting.stats import DraftStats
from ...drafting.token_recycling import TokenRecycling
from ...drafting.tree import DraftTree
from ...messages import counted, did_you_mean
from ...store.datastore import Datastore
from ..shared.comparison import UNDRAFTED, Comparison, Decoded
from ..shared.loading import load_model
from ..shared.prompts import tokens_left
from .chats import Chat

LOOK_UP = "transformers' prompt look-up"
LOOK_UP_TOKENS = 10
BY_NAME: dict[str, Callable[[], Drafter]] = {
    "auto": lambda: Blend(default_sources()),
    "ReferenceCopy": ReferenceCopy,
    "SessionDrafts": SessionDrafts,
    "TokenRecycling": TokenRecycling,
    # as published, with --max-draft-tokens 18
    "LLMA": partial(ReferenceCopy, published=True, copy_length=18),
}
# Names with the folder or Hub id of a datastore, a model or a recycling table.
OF_A_NAME = ("DatastoreDrafts=STORE", "REST=STORE", "DraftModel=MODEL", "TokenRecycling=TABLE")
_ACCENT = "#0072B2"  # the plot's colour of drafts
_NEUTRAL = "#B4BAC1"  # and of other methods
_LABEL = 36  # characters of a line of a method's name


def drafter_named(text: str, tokenizer: PreTrainedTokenizerBase) -> Callable[[], Drafter]:
    """A function that creates a drafter from a name, such as `auto | DatastoreDrafts=org/store`."""
    try:
        parts = [_part(part.strip(), tokenizer) for part in text.split("|")]
    except (OSError, ValueError) as error:
        raise ValueError(f"--drafters {text!r}: {one_line(error)}") from error
    return lambda: reduce(or_, [part() for part in parts])


def _part(text: str, tokenizer: PreTrainedTokenizerBase) -> Callable[[], Drafter]:
    name, _, value = text.partition("=")
    if value and name in ("DatastoreDrafts", "REST"):
        store = Datastore.from_pretrained(value, tokenizer=tokenizer)
        return partial(DatastoreDrafts, store, published=name == "REST")
    if value and name == "DraftModel":
        return partial(DraftModel, load_model(value))
    if value and name == "TokenRecycling":
        return partial(deepcopy, TokenRecycling.from_pretrained(value, tokenizer))
    if text not in BY_NAME:
        known = [*BY_NAME, *OF_A_NAME]
        raise ValueError(
            f"{text!r} is none of {', '.join(known)}, nor several of them, as in "
            f'"ReferenceCopy | TokenRecycling"{did_you_mean(text, known)}'
        )
    return BY_NAME[text]


class Progress:
    """Describes each call of a comparison, with the time that all further ones will take."""

    def __init__(self, prompts: int, methods: int) -> None:
        self.prompts = prompts
        self._methods = methods
        self._calls = 0
        self._seconds = 0.0

    def line(self, name: str, call: Decoded) -> str:
        """A line for a method's call, which is over."""
        number = 1 + self._calls // self._methods
        self._calls += 1
        self._seconds += call.seconds
        left = self.prompts * self._methods - self._calls
        minutes = ceil(left * self._seconds / self._calls / 60)
        done = f"prompt {number} of {self.prompts}, {name}: {call.seconds:.1f} s"
        return f"{done}; about {counted(minutes, 'minute')} left" if left else done


def asked(chats: list[Chat], turns: int | None) -> int:
    """The number of prompts: of each chat all turns, or the first ones."""
    return sum(len(chat.turns[:turns]) for chat in chats)


def measure(
    comparison: Comparison,
    tokenizer: PreTrainedTokenizerBase,
    chats: list[Chat],
    turns: int | None,
    max_new_tokens: int,
) -> None:
    """Answers each turn by all methods, after plain decoding's answers to the earlier ones; says
    on the standard error how far it is."""
    progress = Progress(asked(chats, turns), len(comparison.methods))

    def show(name: str, call: Decoded) -> None:
        print(progress.line(name, call), file=sys.stderr, flush=True)

    print("first a short call by each method, which is not timed", file=sys.stderr, flush=True)
    comparison.warm_up()
    model = comparison.model
    try:
        for chat in chats:
            answers: list[str] = []
            prompts = asked([chat], turns)
            for turn in range(prompts):
                noun = f"{chat.place}: a prompt" if chat.place else "a prompt"
                hint = "it is left out"
                try:
                    inputs = chat.inputs(tokenizer, turn, answers)
                    left = tokens_left(inputs, model.config, noun, hint, max_new_tokens)
                except ValueError as error:
                    print(error, file=sys.stderr)
                    progress.prompts -= prompts - turn
                    break
                call = comparison.ask(inputs.to(model.device), show, max_new_tokens=left)
                answers.append(tokenizer.decode(call.ids, skip_special_tokens=True))
    except KeyboardInterrupt:
        print("stopped; these are the prompts so far", file=sys.stderr)
    if not comparison.calls[UNDRAFTED]:
        raise ValueError("nothing was measured: all prompts were left out")


def recorded_answers(
    chats: list[Chat], tokenizer: PreTrainedTokenizerBase, turns: int | None = None
) -> list[tuple[list[int], list[int]]]:
    """The ids of each prompt and of the recorded answer to it."""
    pairs = [
        (
            chat.inputs(tokenizer, turn, chat.answers)["input_ids"][0].tolist(),
            tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"],
        )
        for chat in chats
        for turn, answer in enumerate(chat.answers[: len(chat.turns)][:turns])
    ]
    return [(prompt, answer) for prompt, answer in pairs if answer]


def replay(
    answers: Iterable[tuple[list[int], list[int]]],
    drafter: Drafter,
    vocab_size: int,
    max_draft_tokens: int,
) -> DraftStats:
    """The statistics of `generate` if a model wrote these answers; the drafter sees tokens only."""
    stats = DraftStats()
    for prompt_ids, answer_ids in answers:
        drafter.begin(np.array(prompt_ids), vocab_size)
        left = np.array(answer_ids)
        draft = DraftTree.empty()
        accepted = 0
        while len(left):
            stats.record_rows([(len(draft), accepted)])
            drafter.observe(Observation(left[: accepted + 1], draft))
            left = left[accepted + 1 :]
            began = perf_counter()
            draft = drafter.draft(max_draft_tokens, Call())
            stats.drafting_seconds += perf_counter() - began
            accepted = min(len(draft.along(left.tolist())), max(len(left) - 1, 0))
        drafter.end()
    return stats


def plot_speed_ups(comparison: Comparison, path: Path) -> None:
    """Draws a bar for each method, the fastest on top, with the bounds of its speed-up."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    gains = {name: comparison.gain(name) for name in comparison.calls}
    names = sorted(gains, key=lambda name: gains[name].ratio)
    with rc_context({"font.size": 9, "savefig.dpi": 200}):
        figure = Figure(figsize=(8, 0.42 * len(names) + 1), layout="constrained")
        axes = figure.subplots()
        for row, name in enumerate(names):
            gain = gains[name]
            ours = "candidate_generator" in comparison.methods[name]
            axes.barh(fill(name, _LABEL), gain.ratio, color=_ACCENT if ours else _NEUTRAL)
            axes.plot([gain.low, gain.high], [row, row], color="black")
            figures = f"{gain.ratio:.2f}x, MAT {comparison.mat(name):.2f}"
            right = axes.get_yaxis_transform()  # x in widths of the axes
            axes.text(1.02, row, figures, transform=right, va="center")
        axes.axvline(1, color="black", linestyle="--")
        prompts = counted(len(comparison.calls[comparison.first]), "prompt")
        axes.set_xlabel(f"times as fast as {comparison.first}, {prompts}")
        figure.savefig(path)
