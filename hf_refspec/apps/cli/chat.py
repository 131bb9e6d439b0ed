"""`hf-refspec chat`: a conversation in the terminal, with drafts from texts."""

import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field
from io import TextIOWrapper
from time import perf_counter
from typing import Any

from rich.text import Text
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from ...drafting.stats import DraftStats
from ...kernels.compilation import drafting_kernels
from ...messages import counted
from ..shared import prompts
from ..shared.loading import load_config, load_model, load_tokenizer
from ..shared.streams import AnswerStream, LiveDrafts, Terminal, legend
from .arguments import add_answering, decoding_options, read_text, sources

_HELP = """\
/stats  how many tokens of this session were drafted, and by what
/reset  a new conversation
/exit   leave, as does Ctrl-D; Ctrl-C stops an answer"""


def add_chat(parser: ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="the system message of the chat")
    add_answering(parser, max_new_tokens=512)


def chat(args: Namespace) -> None:
    options = {**decoding_options(args), "max_new_tokens": args.max_new_tokens}
    context = args.context and read_text(args.context, "--context")
    tokenizer = load_tokenizer(args.model)
    hint = f"hf-refspec generate --model {args.model} continues a text as it is"
    prompts.check_chat_template(tokenizer, args.model, hint)
    messages = prompts.chat_messages([context or ""], [], args.system)
    try:
        beginning = prompts.chat_inputs(tokenizer, messages)
    except ValueError as error:
        hint = "choose another --model" if args.system is None else "leave out --system"
        raise ValueError(f"{error}; {hint}") from error
    noun = "--system" if context is None else f"--context {args.context}"
    prompts.tokens_left(beginning, load_config(args.model), noun, "shorten it", 1)
    new_drafters = sources(args, tokenizer)
    model = load_model(args.model, args.device_map, args.dtype)
    drafter = LiveDrafts(new_drafters(model))
    drafting_kernels.compile()
    TerminalChat(model, tokenizer, drafter, Terminal(), options, context, args.system).converse()


@dataclass
class TerminalChat:
    """A conversation: each line of the standard input is a message."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: LiveDrafts
    console: Terminal
    options: dict[str, Any]  # of `generate`
    document: str | None = None  # precedes the first message
    system: str | None = None
    questions: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    _stats: DraftStats = field(default_factory=DraftStats)

    def converse(self) -> None:
        """Answers what is typed until /exit or the end of the input."""
        if isinstance(sys.stdin, TextIOWrapper):  # a line that is not UTF-8 ends no conversation
            sys.stdin.reconfigure(errors="replace")
        typed = sys.stdin.isatty()
        if typed:
            self.console.print(Text(_HELP, "dim"))
        while True:
            try:
                line = input("> " if typed else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                if not typed:
                    raise
                line = ""
            if line == "/exit":
                return
            if line == "/stats":
                self.console.print(legend(self._stats))
                self.console.print(str(self._stats))
            elif line == "/reset":
                self.questions, self.answers = [], []
            elif line.startswith("/"):
                self.console.print(_HELP)
            elif line:
                self._answer(line)

    def _answer(self, question: str) -> None:
        """Streams an answer, which stays in the conversation even if Ctrl-C cuts it off."""
        about = ("this message", "shorten it")
        if self.questions:
            about = ("this conversation", "/reset begins a new one")
        questions = [*self.questions, question]
        messages = prompts.chat_messages(questions, self.answers, self.system, self.document)
        wanted = self.options["max_new_tokens"]
        try:
            inputs = prompts.chat_inputs(self.tokenizer, messages)
            fitting = prompts.tokens_left(inputs, self.model.config, *about, wanted)
        except ValueError as error:
            self.console.print(Text(str(error), "red"))
            return
        began = perf_counter()
        ids = self._decode(inputs.to(self.model.device), fitting)
        seconds = perf_counter() - began
        if not ids:
            self._note("stopped; the question is forgotten")
            return
        self._stats += self.drafter.stats
        if self.console.is_terminal:
            speed = Text(f"  {len(ids) / seconds:.1f} tokens/s", "dim")
            self.console.print(legend(self.drafter.stats) + speed)
        self.questions = questions
        self.answers.append(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _decode(self, inputs: BatchEncoding, max_new_tokens: int) -> list[int]:
        """Streams an answer, up to Ctrl-C; returns its ids."""
        stream = AnswerStream(self.console, self.tokenizer)
        options = {**self.options, "max_new_tokens": max_new_tokens}
        note = ""
        try:
            with self.drafter.heard_by(stream.put):
                output = self.model.generate(**inputs, **options, candidate_generator=self.drafter)
            unheard = output[0, inputs["input_ids"].shape[1] + len(stream.ids) :].tolist()
            stream.put(unheard, [None] * len(unheard))  # all, where no drafter runs
            if len(stream.ids) == max_new_tokens:
                note = f"stopped after {counted(max_new_tokens, 'token')}"
        except KeyboardInterrupt:
            note = "stopped"
        stream.end()
        if note and stream.ids:
            self._note(note)
        return stream.ids

    def _note(self, text: str) -> None:
        self.console.print(Text(f"({text})", "dim"))
