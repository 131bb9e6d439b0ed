"""Answers questions, and prints how the answers came about."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from itertools import groupby
from time import perf_counter
from typing import Any

import torch
from rich.text import Text
from transformers import PreTrainedModel, TextStreamer

from ...ralm.checked_search import RetrievalError
from ...ralm.stats import RetrievalStats
from ...retrieval.knowledge_base import KnowledgeBase
from ...store.printable import printable
from ..shared.console import Terminal, verdict
from ..shared.prompts import chat_inputs, text_inputs, user

ROUNDS = 2
EXCERPT_LINES = 2
LITTLE_WAITING = 0.1  # of the time
SEARCHED, RIGHT, WRONG = "s", "+", "x"
INDENT = " " * 12


@dataclass(frozen=True)
class Call:
    """One call of `generate`: all ids, how many are new, how long it took, what was retrieved."""

    ids: list[int]
    new_tokens: int
    seconds: float
    stats: RetrievalStats


@dataclass(frozen=True)
class Comparison:
    """The calls for one prompt: the answer that was shown, the baseline, which waits for every
    search, and speculative ones."""

    answer: Call
    baseline: list[Call]
    speculated: list[Call]

    @property
    def identical(self) -> bool:
        return self.verdict == verdict([], [])

    @property
    def verdict(self) -> str:
        expected = self.baseline[0].ids
        calls = [self.answer, *self.baseline, *self.speculated]
        others = [call.ids for call in calls if call.ids != expected]
        return verdict(expected, others[0] if others else expected)


class Answers:
    """Answers questions and prints how the answers came about.

    Args:
        model (`PreTrainedModel`): The model; its own settings say whether it samples.
        base ([`KnowledgeBase`]): The passages.
        generating (`dict`): The keyword arguments of every `generate`.
        speculating (`dict`): Further ones that say what is speculated.
        compare (`bool`): Whether every answer is compared with the one that waits for each search.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        base: KnowledgeBase,
        generating: dict[str, Any],
        speculating: dict[str, Any],
        compare: bool,
    ) -> None:
        self._answers: list[Call] = []
        self._comparisons: list[Comparison] = []
        self._model = model
        self._base = base
        self._tokenizer = base.tokenizer
        self._generating = generating
        self._speculating = speculating
        self._compare = compare
        self._console = Terminal(soft_wrap=True)

    @property
    def identical(self) -> bool:
        """Whether all answers that were compared are the same."""
        return all(comparison.identical for comparison in self._comparisons)

    def converse(self) -> None:
        """Answers typed questions until the end of the input."""
        print("Type a question, or Ctrl-D to end.")
        while True:
            try:
                question = input("> ")
            except EOFError:
                print()
                return
            try:
                if question.strip():
                    self.ask(question)
            except ValueError as error:  # too long, for example; the next may fit
                print(error, file=sys.stderr)

    def print_question(self, question: str) -> None:
        """Prints a question that was not typed into the terminal."""
        self._console.print(Text(f"\n── {question}", "dim"))

    def ask(self, question: str) -> None:
        """Prints the answer as it is written, then its passages, guesses and speed.

        Raises:
            ValueError: If the question does not fit into the model, or the retriever fails.
        """
        inputs = self._prompt(question)
        try:
            streamer = TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
            answer = self._call(inputs, True, streamer)
            self._answers.append(answer)
            self._print_passages(answer.stats)
            if self._speculating["speculation"] is not None:
                self._print_guesses(answer.stats)
            if not self._compare:
                self._print_row("speed", _speed([answer]))
                return
            comparison = Comparison(answer, [], [])  # the answer has warmed up
            for _ in range(ROUNDS):  # in turn, so that other processes disturb both alike
                comparison.baseline.append(self._call(inputs, False))
                comparison.speculated.append(self._call(inputs, True))
        except RetrievalError as error:
            raise ValueError(str(error)) from error
        self._comparisons.append(comparison)
        self._print_comparison([comparison], comparison.verdict)

    def print_summary(self) -> None:
        """Prints the speed of all answers together, and whether there was anything to gain."""
        if len(self._answers) > 1:
            print(f"\nAll {len(self._answers)} answers together:")
            if self._compare:
                same = sum(comparison.identical for comparison in self._comparisons)
                self._print_comparison(self._comparisons, f"ids identical in {same}")
            else:
                self._print_row("speed", _speed(self._answers))
        baseline = [call for comparison in self._comparisons for call in comparison.baseline]
        if baseline and _fraction_waiting(baseline) < LITTLE_WAITING:
            print(
                "\nSearches are so fast here that there is little to gain: speculative retrieval "
                "pays where the\nmodel waits long for them, with many passages for example."
            )

    def _prompt(self, question: str) -> Any:
        """The question in the chat template, if there is one; otherwise as it is."""
        if self._tokenizer.chat_template is not None:
            inputs = chat_inputs(self._tokenizer, [user(question)])
        else:
            inputs = text_inputs(self._tokenizer, question)
        return inputs.to(self._model.device)

    def _call(self, inputs: Any, speculating: bool, streamer: TextStreamer | None = None) -> Call:
        stats = RetrievalStats()
        how = self._speculating if speculating else {"speculation": None}
        torch.manual_seed(0)
        began = perf_counter()
        output = self._model.generate(
            **inputs, **self._generating, **how, retrieval_stats=stats, streamer=streamer
        )
        ids = output[0].tolist()
        new_tokens = len(ids) - inputs["input_ids"].shape[1]
        return Call(ids, new_tokens, perf_counter() - began, stats)

    def _print_passages(self, stats: RetrievalStats) -> None:
        """Prints each passage once, in the order of first use."""
        width = self._console.width - len(INDENT)
        label = "passages"
        for passage_id in dict.fromkeys(stats.best_ids):
            steps = [i for i, best in enumerate(stats.best_ids, 1) if best == passage_id]
            name = f"{passage_id}, {printable(self._base.source(passage_id))}"
            self._print_row(label, f"{name}: {_step_ranges(steps)} of {stats.steps}")
            for line in _excerpt(self._base.text(passage_id), width):
                self._console.print(INDENT + line, style="dim", markup=False)
            label = ""

    def _print_guesses(self, stats: RetrievalStats) -> None:
        """Prints a character for each step: whether the request cache was right."""
        marks = [RIGHT if right else WRONG for right in stats.speculation_was_right]
        marks[:1] = [SEARCHED]  # the first step has an empty request cache
        line = Text(" ".join("".join(marks[i : i + 10]) for i in range(0, len(marks), 10)))
        line.highlight_words([RIGHT], "green")
        line.highlight_words([WRONG], "red")
        right, wrong = stats.verified, stats.mismatched
        self._print_row(
            "guesses", line.append(f"  {right} right ({RIGHT}), {wrong} wrong ({WRONG})")
        )

    def _print_comparison(self, comparisons: list[Comparison], verdict: str) -> None:
        baseline = [call for comparison in comparisons for call in comparison.baseline]
        speculated = [call for comparison in comparisons for call in comparison.speculated]
        self._print_row("speed", f"baseline    {_speed(baseline, ROUNDS)}")
        self._print_row("", f"speculated  {_speed(speculated, ROUNDS)}")
        slow, fast = (sum(call.seconds for call in calls) for calls in (baseline, speculated))
        self._print_row("", f"{slow / fast:.2f}x, {verdict}")

    def _print_row(self, label: str, text: str | Text) -> None:
        self._console.print(Text(f"  {label:<{len(INDENT) - 2}}").append(text))


def _speed(calls: list[Call], rounds: int = 1) -> str:
    """How fast some calls were, and how much of the time retrieval took; each prompt had `rounds`
    calls."""
    tokens = sum(call.new_tokens for call in calls)
    seconds = sum(call.seconds for call in calls)
    searches = sum(call.stats.searches for call in calls) // rounds
    queries = sum(call.stats.query_seconds for call in calls) / seconds
    return (
        f"{tokens // rounds} tokens, {tokens / seconds:.1f} tokens/s: "
        f"{100 * _fraction_waiting(calls):.0f} % waiting for {searches} searches, "
        f"{100 * queries:.0f} % making queries"
    )


def _fraction_waiting(calls: list[Call]) -> float:
    """The fraction of the time that was spent waiting for searches."""
    return sum(call.stats.waiting_seconds for call in calls) / sum(call.seconds for call in calls)


def _step_ranges(steps: list[int]) -> str:
    """`[1, 2, 3, 7]` as "steps 1-3, 7"."""
    ranges = []
    for _, group in groupby(enumerate(steps), lambda pair: pair[1] - pair[0]):
        run = [step for _, step in group]
        ranges.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(ranges)


def _excerpt(text: str, width: int) -> list[str]:
    """The first lines of a passage, without control characters."""
    words = printable(" ".join(text.split()))
    return textwrap.wrap(words, max(width, 20), max_lines=EXCERPT_LINES, placeholder=" …")
