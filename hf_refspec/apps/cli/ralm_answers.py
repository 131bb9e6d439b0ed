"""Answers questions, and prints how each answer came about."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.text import Text
from transformers import PreTrainedModel, TextStreamer

from ...ralm.iterative import iterative_ralm
from ...ralm.stats import RetrievalStats
from ...retrieval.knowledge_base import KnowledgeBase
from ...retrieval.retriever import Retriever
from ...store.printable import printable
from ..shared.comparison import Decoded, decode, rate, speedup, verdict
from ..shared.console import Terminal
from ..shared.prompts import question_inputs

ROUNDS = 2
EXCERPT_LINES = 2
SEARCHED, RIGHT, WRONG = "s", "+", "x"
INDENT = " " * 12


@dataclass(frozen=True)
class Call(Decoded):
    """One call of `generate`, with what it retrieved."""

    stats: RetrievalStats


@dataclass(frozen=True)
class Answer:
    """The call that is shown, and those that are compared; the baseline waits for every search."""

    shown: Call
    baseline: list[Call]
    speculated: list[Call]

    @property
    def verdict(self) -> str:
        calls = [*self.baseline, self.shown, *self.speculated]
        expected = calls[0].ids
        others = [call.ids for call in calls if call.ids != expected]
        return verdict(expected, others[0] if others else expected)

    @property
    def identical(self) -> bool:
        return self.verdict == verdict([], [])


@dataclass
class Answers:
    """Answers questions and prints how the answers came about. With `compare` each is decoded
    again, and also by the baseline; the model's own settings say whether it samples."""

    model: PreTrainedModel
    base: KnowledgeBase
    retriever: Retriever
    max_new_tokens: int
    compare: bool
    console: Terminal = field(default_factory=lambda: Terminal(soft_wrap=True))
    answers: list[Answer] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """Whether speculation changed no answer that was compared."""
        return all(answer.identical for answer in self.answers)

    def ask(self, question: str) -> None:
        """Prints the answer as it is written, then its passages, guesses and speed."""
        self.console.print(Text(f"\n── {question}", "dim"))
        inputs = question_inputs(self.base.tokenizer, question).to(self.model.device)
        streamer = TextStreamer(self.base.tokenizer, skip_prompt=True, skip_special_tokens=True)
        answer = Answer(self._call(inputs, streamer=streamer), [], [])  # which also warms up
        self.answers.append(answer)
        self._print_passages(answer.shown.stats)
        self._print_guesses(answer.shown.stats)
        if self.compare:
            for _ in range(ROUNDS):  # in turn, so that other processes disturb both alike
                answer.baseline.append(self._call(inputs, speculation=None))
                answer.speculated.append(self._call(inputs))
        self._print_speed([answer], answer.verdict)

    def print_summary(self) -> None:
        """Prints the speed of all answers together."""
        if len(self.answers) > 1:
            self.console.print(f"\nAll {len(self.answers)} answers together:")
            same = sum(answer.identical for answer in self.answers)
            self._print_speed(self.answers, f"ids identical in {same}")

    def _call(self, inputs: Any, **options: Any) -> Call:
        stats = RetrievalStats()
        torch.manual_seed(0)
        decoded = decode(
            self.model,
            inputs,
            custom_generate=iterative_ralm,
            retriever=self.retriever,
            tokenizer=self.base.tokenizer,
            max_new_tokens=self.max_new_tokens,
            retrieval_stats=stats,
            **options,
        )
        return Call(decoded.ids, decoded.seconds, stats)

    def _print_passages(self, stats: RetrievalStats) -> None:
        """Prints each passage once, in the order of first use."""
        label = "passages"
        for passage_id in dict.fromkeys(stats.best_ids):
            steps = [str(i) for i, best in enumerate(stats.best_ids, 1) if best == passage_id]
            name = f"{passage_id}, {printable(self.base.source(passage_id))}"
            self._print_row(label, f"{name}: steps {', '.join(steps)} of {stats.steps}")
            words = printable(" ".join(self.base.text(passage_id).split()))
            width = max(self.console.width - len(INDENT), 20)
            for line in textwrap.wrap(words, width, max_lines=EXCERPT_LINES, placeholder=" …"):
                self.console.print(Text(INDENT + line, "dim"))
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

    def _print_speed(self, answers: list[Answer], verdict: str) -> None:
        if not self.compare:
            self._print_row("speed", _speed([answer.shown for answer in answers]))
            return
        baseline = [call for answer in answers for call in answer.baseline]
        speculated = [call for answer in answers for call in answer.speculated]
        self._print_row("speed", f"baseline    {_speed(baseline, ROUNDS)}")
        self._print_row("", f"speculated  {_speed(speculated, ROUNDS)}")
        self._print_row("", f"{speedup(baseline, speculated):.2f}x, {verdict}")

    def _print_row(self, label: str, text: str | Text) -> None:
        self.console.print(Text(f"  {label:<{len(INDENT) - 2}}").append(text))


def _speed(calls: list[Call], rounds: int = 1) -> str:
    """How fast calls were, `rounds` for each question, and how much of the time retrieval took."""
    tokens = sum(len(call.ids) for call in calls) // rounds
    searches = sum(call.stats.searches for call in calls) // rounds
    percent = 100 / sum(call.seconds for call in calls)
    waiting = percent * sum(call.stats.waiting_seconds for call in calls)
    queries = percent * sum(call.stats.query_seconds for call in calls)
    return (
        f"{tokens} tokens, {rate(calls):.1f} tokens/s: {waiting:.0f} % waiting for {searches} "
        f"searches, {queries:.0f} % making queries"
    )
