"""`hf-refspec chat`: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
from argparse import ArgumentParser, Namespace
from io import TextIOWrapper
from time import perf_counter
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from transformers import (
    BatchEncoding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from ...drafting.stats import SpeculationStats
from ...generation.warmup import warmup
from ..shared.console import Terminal
from ..shared.default_model import load_config, load_model, load_tokenizer
from ..shared.live_drafts import AnswerStream, LiveDrafts, legend, style_of
from ..shared.prompts import (
    Message,
    assistant,
    chat_inputs,
    check_chat_template,
    tokens_left,
    user,
    with_document,
)
from .answering import (
    add_answering,
    quieten_transformers,
    read_texts,
    sampling_options,
    sources,
)

_HELP = """\
/stats  what the drafts of this session were worth
/reset  a new conversation
/exit   leave, as does Ctrl-D; Ctrl-C stops an answer"""


def add_chat(parser: ArgumentParser) -> None:
    """Adds the arguments of `hf-refspec chat`."""
    parser.set_defaults(run=_chat)
    add_answering(parser, max_new_tokens=512)


def _chat(args: Namespace) -> int:
    """Answers until the end of the input."""
    quieten_transformers()
    options = {**sampling_options(args), "max_new_tokens": args.max_new_tokens}
    texts = read_texts(args)
    tokenizer = load_tokenizer(args.model)
    way_out = f"hf-refspec generate --model {args.model} goes on from a text as it is"
    check_chat_template(tokenizer, args.model, way_out)
    if texts.context is not None:
        inputs = chat_inputs(tokenizer, [user(texts.context)])
        tokens_left(inputs, load_config(args.model), f"--context {args.context}", "shorten it", 1)
    drafter = LiveDrafts(sources(args, texts, tokenizer))
    model = load_model(args.model)
    warmup()
    Chat(model, tokenizer, drafter, Terminal(), options, texts.context).converse()
    return 0


class Chat:
    """A conversation whose messages are typed, or come line by line out of a file.

    Args:
        model (`PreTrainedModel`): The target model.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer, with a chat template.
        drafter ([`LiveDrafts`]): What drafts.
        console (`Terminal`): Where to print.
        options (`dict`): For `generate`, `max_new_tokens` among them.
        document (`str`, *optional*): Stands before the first message.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: LiveDrafts,
        console: Terminal,
        options: dict[str, Any],
        document: str | None = None,
    ) -> None:
        self.messages: list[Message] = []
        self._model = model
        self._tokenizer = tokenizer
        self._drafter = drafter
        self._console = console
        self._options = options
        self._document = document
        self._stats = SpeculationStats()

    def converse(self) -> None:
        """Answers what is typed until /exit or the end of the input."""
        if isinstance(sys.stdin, TextIOWrapper):  # what is not UTF-8 ends no conversation
            sys.stdin.reconfigure(errors="replace")
        if sys.stdin.isatty():
            self._console.print(Text(_HELP, "dim"))
        while (line := self._next_line()) not in (None, "/exit"):
            if line == "/stats":
                self._print_stats()
            elif line == "/reset":
                self.messages = []
            elif line == "/help":
                self._console.print(_HELP)
            elif line.startswith("/"):
                self._console.print(f"There is no {line.split()[0]}. There are:\n{_HELP}")
            elif line:
                self._answer(line)

    def _next_line(self) -> str | None:
        """What is typed next; `None` at the end."""
        typed = sys.stdin.isatty()
        while True:
            try:
                return input("> " if typed else "").strip()
            except EOFError:
                if typed:
                    self._console.print()
                return None
            except KeyboardInterrupt:
                if not typed:
                    raise
                self._console.print("\n/exit or Ctrl-D leaves")

    def _answer(self, question: str) -> None:
        """Streams an answer. One that Ctrl-C stops stays in the conversation as far as it came."""
        first = not self.messages and self._document is not None
        content = with_document(self._document or "", question) if first else question
        messages = [*self.messages, user(content)]
        inputs = chat_inputs(self._tokenizer, messages)
        wanted = self._options["max_new_tokens"]
        noun, way_out = "this conversation", "/reset begins a new one"
        if not self.messages:
            noun, way_out = "this message", "shorten it"
        try:
            fitting = tokens_left(inputs, self._model.config, noun, way_out, wanted)
        except ValueError as error:
            self._console.print(Text(str(error), "red"))
            return
        ids = self._decode(inputs.to(self._model.device), fitting)
        if ids:
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
            self.messages = [*messages, assistant(text)]

    def _decode(self, inputs: BatchEncoding, max_new_tokens: int) -> list[int]:
        """Streams an answer and returns its ids; none if it was broken off."""
        stream = AnswerStream(self._console, self._tokenizer)
        self._drafter.listener = stream.put
        options = {**self._options, "max_new_tokens": max_new_tokens}
        began = perf_counter()
        try:
            with Interrupt() as interrupt:
                output = self._model.generate(
                    **inputs,
                    **options,
                    candidate_generator=self._drafter,
                    stopping_criteria=StoppingCriteriaList([interrupt]),
                )
        except KeyboardInterrupt:
            stream.end()
            self._note("broken off; the question is forgotten")
            return []
        stream.end()
        ids = output[0, inputs["input_ids"].shape[1] :].tolist()
        if interrupt.came:
            self._note("stopped")
        elif len(ids) == max_new_tokens:
            self._note(f"stopped after {max_new_tokens} tokens")
        self._stats += self._drafter.stats
        if self._console.is_terminal:
            rate = Text(f"  {len(ids) / (perf_counter() - began):.1f} tokens/s", "dim")
            self._console.print(legend(self._drafter.stats) + rate)
        return ids

    def _note(self, text: str) -> None:
        self._console.print(Text(f"({text})", "dim"))

    def _print_stats(self) -> None:
        """The accepted tokens that each source drafted, and all of it together."""
        if self._stats.tokens == 0:
            self._console.print("There is no answer yet.")
            return
        table = Table("source", box=SIMPLE_HEAD, pad_edge=False)
        for column in ("accepted", "by it first"):
            table.add_column(column, justify="right")
        for index, source in enumerate(self._stats.sources):
            counts = map(str, (source.accepted, source.first))
            table.add_row(Text(source.name, style_of(index)), *counts)
        self._console.print(table)
        self._console.print(str(self._stats))


class Interrupt(StoppingCriteria):
    """While it is entered, Ctrl-C ends an answer after the forward pass that is under way; a second
    one breaks off at once, as `KeyboardInterrupt`.

    Attributes:
        came (`bool`): Whether there was one.
    """

    came = False

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._stop)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> Any:  # bool of shape (1,)
        return torch.full(input_ids.shape[:1], self.came, device=input_ids.device)

    def _stop(self, *_: object) -> None:
        self.came = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
