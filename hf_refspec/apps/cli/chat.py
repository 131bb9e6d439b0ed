"""`hf-refspec chat`: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field
from io import TextIOWrapper
from typing import Any

import torch
from jinja2 import TemplateError
from rich.text import Text
from transformers import (
    BatchEncoding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from ...drafting.compilation import drafting_kernels
from ...drafting.stats import SpeculationStats
from ...smollm2 import HUB_ID
from ..shared.comparison import Decoded, decode, rate
from ..shared.console import Terminal
from ..shared.live_drafts import AnswerStream, LiveDrafts, legend
from ..shared.loading import load_config, load_model, load_tokenizer
from ..shared.prompts import (
    Message,
    assistant,
    chat_inputs,
    check_chat_template,
    system,
    tokens_left,
    user,
    with_document,
)
from .answering import (
    add_answering,
    decoding_options,
    quieten_transformers,
    read_context,
    sources,
)

_HELP = """\
/stats  how many tokens of this session were drafted, and by what
/reset  a new conversation
/exit   leave, as does Ctrl-D; Ctrl-C stops an answer"""


def add_chat(parser: ArgumentParser) -> None:
    parser.set_defaults(run=_chat)
    parser.add_argument("--system", metavar="TEXT", help="the system message of the chat")
    add_answering(parser, max_new_tokens=512)


def _chat(args: Namespace) -> int:
    """Answers until the end of the input."""
    quieten_transformers()
    options = {**decoding_options(args), "max_new_tokens": args.max_new_tokens}
    context = read_context(args)
    tokenizer = load_tokenizer(args.model)
    hint = f"hf-refspec generate --model {args.model} goes on from a text as it is"
    check_chat_template(tokenizer, args.model, hint)
    opening = [] if args.system is None else [system(args.system)]
    if opening or context is not None:
        try:
            beginning = chat_inputs(tokenizer, [*opening, user(context or "")])
        except TemplateError as error:
            raise ValueError(
                f"the chat template of {args.model or HUB_ID} takes no --system message: {error}; "
                "leave it out"
            ) from error
        noun = "--system" if context is None else f"--context {args.context}"
        tokens_left(beginning, load_config(args.model), noun, "shorten it", 1)
    drafter = LiveDrafts(sources(args, tokenizer))
    model = load_model(args.model, args.device_map, args.dtype)
    drafting_kernels.compile()
    Chat(model, tokenizer, drafter, Terminal(), options, context, opening).converse()
    return 0


@dataclass
class Chat:
    """A conversation; each line of the standard input is a message. `document` stands before the
    first, `opening` has the system message if there is one, and `options` are for `generate`,
    `max_new_tokens` among them."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: LiveDrafts
    console: Terminal
    options: dict[str, Any]
    document: str | None = None
    opening: list[Message] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    _stats: SpeculationStats = field(default_factory=SpeculationStats)

    def converse(self) -> None:
        """Answers what is typed until /exit or the end of the input."""
        if isinstance(sys.stdin, TextIOWrapper):  # a line that is not UTF-8 ends no conversation
            sys.stdin.reconfigure(errors="replace")
        if sys.stdin.isatty():
            self.console.print(Text(_HELP, "dim"))
        while (line := self._next_line()) not in (None, "/exit"):
            if line == "/stats":
                self.console.print(legend(self._stats))
                self.console.print(str(self._stats))
            elif line == "/reset":
                self.messages = []
            elif line == "/help":
                self.console.print(_HELP)
            elif line.startswith("/"):
                self.console.print(f"There is no {line.split()[0]}. There are:\n{_HELP}")
            elif line:
                self._answer(line)

    def _next_line(self) -> str | None:
        """The next line of the input; `None` at its end."""
        typed = sys.stdin.isatty()
        while True:
            try:
                return input("> " if typed else "").strip()
            except EOFError:
                if typed:
                    self.console.print()
                return None
            except KeyboardInterrupt:
                if not typed:
                    raise
                self.console.print("\n/exit or Ctrl-D leaves")

    def _answer(self, question: str) -> None:
        """Streams an answer. What Ctrl-C leaves of it stays in the conversation."""
        first = not self.messages and self.document is not None
        content = with_document(self.document or "", question) if first else question
        messages = [*self.messages, user(content)]
        inputs = chat_inputs(self.tokenizer, [*self.opening, *messages])
        noun, hint = "this conversation", "/reset begins a new one"
        if not self.messages:
            noun, hint = "this message", "shorten it"
        wanted = self.options["max_new_tokens"]
        try:
            fitting = tokens_left(inputs, self.model.config, noun, hint, wanted)
        except ValueError as error:
            self.console.print(Text(str(error), "red"))
            return
        answer = self._decode(inputs.to(self.model.device), fitting)
        if answer is None:
            self._note("broken off; the question is forgotten")
            return
        self._stats += self.drafter.stats
        if self.console.is_terminal:
            speed = Text(f"  {rate([answer]):.1f} tokens/s", "dim")
            self.console.print(legend(self.drafter.stats) + speed)
        text = self.tokenizer.decode(answer.ids, skip_special_tokens=True)
        self.messages = [*messages, assistant(text)]

    def _decode(self, inputs: BatchEncoding, max_new_tokens: int) -> Decoded | None:
        """Streams an answer; returns `None` if it was broken off."""
        stream = AnswerStream(self.console, self.tokenizer)
        self.drafter.listener = stream.put
        try:
            with Interrupt() as interrupt:
                answer = decode(
                    self.model,
                    inputs,
                    **{**self.options, "max_new_tokens": max_new_tokens},
                    candidate_generator=self.drafter,
                    stopping_criteria=StoppingCriteriaList([interrupt]),
                )
        except KeyboardInterrupt:
            return None
        finally:
            stream.end()
        if interrupt.came:
            self._note("stopped")
        elif len(answer.ids) == max_new_tokens:
            self._note(f"stopped after {max_new_tokens} tokens")
        return answer

    def _note(self, text: str) -> None:
        self.console.print(Text(f"({text})", "dim"))


class Interrupt(StoppingCriteria):
    """While it is entered, Ctrl-C ends an answer after the forward pass that is under way; a second
    one breaks off at once, as `KeyboardInterrupt`."""

    came = False  # whether there was one

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._stop)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> Any:
        return torch.full(input_ids.shape[:1], self.came, device=input_ids.device)

    def _stop(self, *_: object) -> None:
        self.came = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
