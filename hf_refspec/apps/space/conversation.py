"""The host of the page, the conversation of each visitor, and the race of each answer.

A race is one answer, decoded plainly and with drafts at once: two real calls of `generate` in
threads, which take turns, a forward pass at a time. Each has a clock that runs only in its turns;
the call that has computed less goes next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from time import perf_counter
from typing import Any

import torch
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer

from ...drafting.auto import default_sources
from ...drafting.copied_spans import CopiedSpan
from ...drafting.datastore_drafts import DatastoreDrafts
from ...drafting.tree import DraftTree
from ...generation.speculate import speculate
from ...smollm2 import HUB_ID
from ...store.datastore import Datastore
from ..shared.comparison import first_difference
from ..shared.prompts import chat_inputs, chat_messages, tokens_left
from ..shared.streams import LiveDrafts, TextStream


@dataclass(frozen=True)
class Host:
    """A model that answers the visitors."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase  # with a chat template
    datastore: Datastore | None = None  # a further source of drafts
    name: str = HUB_ID  # for people

    def drafter(self) -> LiveDrafts:
        """A new default drafter, with the datastore."""
        stores = [DatastoreDrafts(self.datastore)] if self.datastore else []
        return LiveDrafts([*default_sources(), *stores])


@dataclass
class Conversation:
    """Messages with the races of their answers, and a drafter that learns from race to race."""

    document: str = ""  # precedes the first message
    turns: list[tuple[str, Race]] = field(default_factory=list)
    busy: Any = field(default_factory=Lock)  # held while an answer is shown
    left: bool = False  # the visitor has begun another one
    _drafter: LiveDrafts | None = None

    def ask(self, host: Host, message: str, max_new_tokens: int, document: str = "") -> Race:
        """Adds a message. Running the race decodes its answer.

        The `document` is used only with the first message."""
        if not self.turns:
            self.document = document
        if not message.strip():
            raise ValueError("the message is empty; type one, or choose an example")
        questions = [*(earlier for earlier, _ in self.turns), message]
        answers = [race.drafted.text for _, race in self.turns]
        messages = chat_messages(questions, answers, document=self.document)
        inputs = chat_inputs(host.tokenizer, messages)
        about = ("the message with its document", "shorten them")
        if self.turns:
            about = ("the conversation", "begin a new one")
        fitting = tokens_left(inputs, host.model.config, *about, max_new_tokens)
        self._drafter = self._drafter or host.drafter()
        race = Race(host.model, host.tokenizer, inputs, fitting, self._drafter)
        self.turns.append((message, race))
        return race

    def stop(self) -> None:
        """Ends the current answer."""
        if self.turns:
            self.turns[-1][1].stop()

    def leave(self) -> None:
        """Ends the current answer, and waits until nothing more of it is shown."""
        self.left = True
        self.stop()
        with self.busy:
            pass


@dataclass(frozen=True)
class RacePass:
    """A forward pass of the target model."""

    tokens: list[int]  # accepted draft tokens, and one that it chose after them
    owners: list[int | None]  # the source that drafted each
    tree: DraftTree  # that it verified

    def accepted(self) -> list[int]:
        """The accepted nodes of the tree, from the root on."""
        return self.tree.along(self.tokens[:-1])


class Race:
    """Two greedy calls of `generate` with the same prompt."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        inputs: BatchEncoding,
        max_new_tokens: int,
        drafter: LiveDrafts,
    ) -> None:
        self.max_new_tokens = max_new_tokens
        self.passes: list[RacePass] = []  # of the drafted call
        self.sources = [type(source).__name__ for source in drafter.sources]
        self.stopped = False
        self.copied: list[CopiedSpan] = []  # of the drafted text, at its end
        self.drafter = drafter
        options = {**inputs.to(model.device), "max_new_tokens": max_new_tokens, "do_sample": False}
        decode = partial(model.generate, **options)

        def decode_drafted() -> None:
            with drafter.heard_by(self._record):
                decode(custom_generate=speculate, candidate_generator=drafter)

        self.plain = Lane(tokenizer, lambda: decode(streamer=self.plain))
        self.drafted = Lane(tokenizer, decode_drafted)

    def run(self) -> Iterator[None]:
        """Yields after every forward pass, when neither computes. An error in one ends both."""
        lanes = [self.plain, self.drafted]
        try:
            while not self.stopped and (going := [lane for lane in lanes if not lane.finished]):
                min(going, key=lambda lane: lane.seconds).advance()
                if self.drafted.completed:
                    self.copied = self.drafter.stats.copied
                yield
        finally:
            for lane in lanes:
                lane.stop()

    def stop(self) -> None:
        """Ends both calls after the current pass."""
        self.stopped = True

    @property
    def completed(self) -> bool:
        return self.plain.completed and self.drafted.completed

    @property
    def finished(self) -> bool:
        """True if neither call computes any more: both are complete, or were stopped."""
        return self.plain.finished and self.drafted.finished

    @property
    def speedup(self) -> float | None:
        """The drafted call's tokens per second, as a multiple of the plain call's."""
        if not (self.plain.rate and self.drafted.rate):
            return None
        return self.drafted.rate / self.plain.rate

    def first_difference(self) -> int | None:
        """The first position at which the ids differ so far, or `None`."""
        position = first_difference(self.plain.ids, self.drafted.ids)
        ended = position == min(len(self.plain.ids), len(self.drafted.ids))
        return None if ended and not self.completed else position

    def _record(self, tokens: Sequence[int], owners: Sequence[int | None]) -> None:
        self.passes.append(RacePass([*tokens], [*owners], self.drafter.verified))
        self.drafted.take(tokens, owners)


class Lane(BaseStreamer):
    """A call that computes only in its turns: `decode` calls `generate`.

    New tokens reach `take`: from a drafter's listener, or from plain decoding as its streamer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, decode: Callable[[], None]) -> None:
        self.ids: list[int] = []
        self.pieces: list[tuple[str, int | None]] = []  # texts, and the index of each one's source
        self.passes = 0
        self.seconds = 0.0
        self.finished = False
        self.completed = False
        self._text = TextStream(tokenizer)
        self._turns: SimpleQueue[bool] = SimpleQueue()  # begins a turn: True to go on
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()  # ends it: an error or `None`
        self._thread = Thread(target=self._run, args=[decode], name="Lane", daemon=True)

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    @property
    def mat(self) -> float:
        return len(self.ids) / self.passes if self.passes else 0.0

    @property
    def rate(self) -> float:
        """Tokens per second of its own time."""
        return len(self.ids) / self.seconds if self.seconds else 0.0

    def advance(self) -> None:
        """Computes up to the tokens of its next forward pass, or to its end."""
        began = perf_counter()
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turns.put(True)
        error = self._ends.get()
        self.seconds += perf_counter() - began
        if error is not None:
            raise error

    def stop(self) -> None:
        """Ends the call at its current token."""
        if not self.finished and self._thread.ident is not None:
            self._turns.put(False)
            self._thread.join()
        self.finished = True

    def put(self, value: torch.Tensor) -> None:
        if value.ndim == 1:  # the prompt comes first, as a row
            self.take(value.tolist(), [None] * len(value))

    def end(self) -> None:
        pass

    def take(self, tokens: Sequence[int], owners: Sequence[int | None]) -> None:
        """Takes the tokens of a forward pass, and waits for the next turn."""
        self.passes += 1
        for token, owner in zip(tokens, owners, strict=True):
            self.ids.append(token)
            self.pieces.append((self._text.put(token), owner))
        self._ends.put(None)
        if not self._turns.get():
            raise _Stopped

    def _run(self, decode: Callable[[], None]) -> None:
        error: BaseException | None = None
        try:
            decode()
            self.completed = True
        except _Stopped:
            pass
        except BaseException as raised:  # `advance` raises it again
            error = raised
        self.pieces.append((self._text.end(), None))
        self.finished = True
        self._ends.put(error)


class _Stopped(BaseException):
    """Ends a call of `generate` from inside; no `except Exception` catches it."""
