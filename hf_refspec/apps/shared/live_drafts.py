"""An answer as it is written, accepted draft tokens coloured by the source that drafted them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ...drafting.blend import Blend
from ...drafting.drafter import Drafter
from ...drafting.observation import Observation
from ...drafting.stats import SpeculationStats
from .text_stream import PART_OF_CHARACTER, TextStream

# Of the sources of a blend, in its order.
STYLES = ("green", "cyan", "magenta", "yellow", "blue")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but tabs and ends of lines

# Takes the tokens of a step, and for each the index of its source; `None` for the target's own.
Listener: TypeAlias = Callable[[Sequence[int], Sequence[int | None]], None]


class LiveDrafts(Blend):
    """A [`Blend`] that tells, step by step, which of its sources drafted each accepted token.

    Args:
        drafters (sequence of [`Drafter`]): The sources.

    Attributes:
        listener (`Listener`, *optional*): Is told. A token that several sources drafted counts for
            the first of them.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__(drafters)
        self.listener: Listener | None = None

    def observe(self, observation: Observation) -> None:
        before = [source.first for source in self.stats.sources]
        super().observe(observation)
        if self.listener is None or observation.of_prompt:
            return
        owners: list[int | None] = []
        for index, source in enumerate(self.stats.sources):
            owners += [index] * (source.first - before[index])
        owners += [None] * (len(observation.tokens) - len(owners))
        self.listener(observation.tokens.tolist(), owners)


class AnswerStream:
    """Prints an answer as its tokens come, a word at a time; `put` is a [`Listener`].

    Args:
        console (`Console`): Where. On a terminal (or for a picture) lines are broken between words,
            elsewhere they stay as they are.
        tokenizer (`PreTrainedTokenizerBase`): The target model's.
    """

    def __init__(self, console: Console, tokenizer: PreTrainedTokenizerBase) -> None:
        self._console = console
        self._text = TextStream(tokenizer)
        self._width = console.width if console.is_terminal or console.record else 0
        self._space = ""  # what is not printed yet
        self._word: list[tuple[str, str]] = []  # its parts and their styles
        self._column = 0

    def put(self, tokens: Sequence[int], owners: Sequence[int | None]) -> None:
        """Prints the words that these tokens complete."""
        for token, owner in zip(tokens, owners, strict=True):
            self._write(self._text.put(token), "" if owner is None else style_of(owner))

    def end(self) -> None:
        """Prints what is left, and ends the line."""
        self._write(self._text.end(), "")
        self._print_word()
        self._console.print()

    def _write(self, text: str, style: str) -> None:
        """Prints a text as far as its words are complete; all of it where no line is broken."""
        if not self._width:  # nor are there colours; rich would turn tabs into spaces
            self._console.file.write(without_controls(text))
            self._console.file.flush()
            return
        for part in re.findall(r"\n|[^\S\n]+|\S+", text):
            if not part.isspace():
                self._word.append((part, style))
                if self._word_length() >= self._width:
                    self._print_word()
                continue
            self._print_word()
            if part == "\n":
                self._break_line()
            else:
                self._space += part.expandtabs(4)

    def _print_word(self) -> None:
        if not self._word:
            return
        length = len(self._space) + self._word_length()
        if self._column and self._column + length > self._width:
            self._break_line()
            length = self._word_length()
        self._out(self._space, "")
        for part, style in self._word:
            self._out(part, style)
        self._column += length
        self._space, self._word = "", []

    def _word_length(self) -> int:
        return sum(cell_len(part) for part, _ in self._word)

    def _break_line(self) -> None:
        self._out("\n", "")
        self._column, self._space = 0, ""

    def _out(self, text: str, style: str) -> None:
        self._console.out(without_controls(text), style=style or None, end="")


def style_of(source: int) -> str:
    """The style of a blend's source, by its index."""
    return STYLES[source % len(STYLES)]


def legend(stats: SpeculationStats) -> Text:
    """How many tokens each source drafted, in its colour."""
    parts = [
        Text(f"■ {source.name} {source.first}", style_of(index))
        for index, source in enumerate(stats.sources)
    ]
    own = stats.tokens - sum(source.first for source in stats.sources)
    return Text("  ").join([*parts, Text(f"■ the model itself {own}")])


def without_controls(text: str) -> str:
    """A text whose control characters a terminal does not obey."""
    return _CONTROL.sub(PART_OF_CHARACTER, text)
