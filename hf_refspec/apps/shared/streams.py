"""Answers while they are generated: tokens as text, and accepted drafts in colour."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ...drafting.blend import Blend
from ...drafting.contract import Drafter, Observation
from ...drafting.stats import DraftStats
from ...drafting.tree import DraftTree

PART_OF_CHARACTER = "\ufffd"

# The byte of each character in the vocabularies of byte-level tokenizers.
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int, text: str) -> bytes:
    """The bytes of a token's text; of a part of a character those that the vocabulary names."""
    written = tokenizer.convert_ids_to_tokens(token)
    if PART_OF_CHARACTER not in text or not isinstance(written, str):
        return text.encode()
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", written):
        return bytes.fromhex(byte[1])
    if _BYTES.keys() >= {*written}:
        return bytes(_BYTES[character] for character in written)
    return text.encode()


class TextStream:
    """Turns tokens into pieces of text, which together are the text of all tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skips_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self._ids: list[int] = []  # a window: a token's text can depend on the one before it
        self._read = 0  # how many of these have been returned as text

    def put(self, token: int) -> str:
        """The text that a token adds; nothing while it ends inside a character."""
        self._ids.append(token)
        text = self.end()
        if text.endswith(PART_OF_CHARACTER):
            return ""
        del self._ids[: self._read]
        self._read = len(self._ids)
        return text

    def end(self) -> str:
        """The rest of the text: a character that was never completed."""
        known = self._decode(self._ids[: self._read])
        return self._decode(self._ids)[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=self._skips_special, clean_up_tokenization_spaces=False
        )


# The styles of a blend's sources, in order.
STYLES = ("green", "cyan", "magenta", "yellow", "blue")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and line ends

# Receives a step's tokens and the index of each one's source; `None` for the target's own.
Listener: TypeAlias = Callable[[Sequence[int], Sequence[int | None]], None]


class Terminal(Console):
    """A console without highlighting; rich's own would exit with 1 when a pipe breaks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)

    def on_broken_pipe(self) -> NoReturn:
        raise  # the BrokenPipeError, which rich is handling


class LiveDrafts(Blend):
    """Tells a listener in each step the source that first drafted each accepted token."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__(drafters)
        self._listener: Listener | None = None
        self.verified = DraftTree.empty()  # the tree of the last step

    @contextmanager
    def heard_by(self, listener: Listener) -> Iterator[None]:
        """Around a call: the listener receives its tokens."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def observe(self, observation: Observation) -> None:
        self.verified = observation.verified
        super().observe(observation)
        if self._listener is not None:
            tokens = observation.tokens.tolist()
            self._listener(tokens, self.stats.owners[-len(tokens) :])


class AnswerStream:
    """Prints an answer token by token, or to a console that records a picture at its end."""

    def __init__(self, console: Console, tokenizer: PreTrainedTokenizerBase) -> None:
        self._console = console
        self._stream = TextStream(tokenizer)
        self._held = Text()
        self.ids: list[int] = []  # of the tokens so far

    def put(self, tokens: Sequence[int], owners: Sequence[int | None]) -> None:
        self.ids += tokens
        for token, owner in zip(tokens, owners, strict=True):
            style = "" if owner is None else STYLES[owner % len(STYLES)]
            self._print(self._stream.put(token), style)

    def end(self) -> None:
        """Prints the rest of the text, and ends the line."""
        self._print(self._stream.end(), "")
        self._console.print(self._held)

    def _print(self, text: str, style: str) -> None:
        text = without_controls(text)
        if self._console.record:
            self._held.append(text, style)
        elif self._console.is_terminal:
            self._console.print(Text(text, style), end="", soft_wrap=True)
        else:  # not by rich, which would turn tabs into spaces
            self._console.file.write(text)
            self._console.file.flush()


def legend(stats: DraftStats) -> Text:
    """The number of accepted tokens that each source drafted, in its colour."""
    parts = [
        Text(f"■ {source.name} {source.first}", STYLES[index % len(STYLES)])
        for index, source in enumerate(stats.sources)
    ]
    chosen = stats.tokens - sum(source.first for source in stats.sources)
    return Text("  ").join([*parts, Text(f"■ the model itself {chosen}")])


def without_controls(text: str) -> str:
    """A model's text for a terminal. Unlike [`printable`] it keeps line ends and all letters."""
    return _CONTROL.sub(PART_OF_CHARACTER, text)
