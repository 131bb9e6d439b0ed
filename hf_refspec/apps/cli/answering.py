"""`hf-refspec generate` and `chat`: a model answers in the terminal, with drafts from texts."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.text import Text
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from ...drafting.auto import default_sources
from ...drafting.blend import Blend
from ...drafting.contract import Drafter
from ...drafting.datastore_drafts import DatastoreDrafts
from ...drafting.session_drafts import SessionDrafts
from ...drafting.stats import DraftStats
from ...kernels.compilation import drafting_kernels
from ...messages import counted
from ...store.datastore import Datastore
from ...text_config import text_config
from ..shared import prompts
from ..shared.live_drafts import AnswerStream, LiveDrafts, Terminal, legend
from ..shared.loading import load_config, load_model, load_tokenizer
from .arguments import add_model, draft_budget, positive, read_text

_HELP = """\
/stats  how many tokens of this session were drafted, and by what
/reset  a new conversation
/exit   leave, as does Ctrl-D; Ctrl-C stops an answer"""


def add_generate(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("prompt", nargs="?", help="the prompt; read from the standard input if left out")
    _add_answering(parser, max_new_tokens=256)


def add_chat(parser: ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="the system message of the chat")
    _add_answering(parser, max_new_tokens=512)


def _add_answering(parser: ArgumentParser, max_new_tokens: int) -> None:
    add = parser.add_argument
    add_model(parser)
    add("--max-new-tokens", type=positive, default=max_new_tokens, metavar="N", help="of an answer")
    help = "at most this many in one forward pass; auto: those that pay"
    add("--max-draft-tokens", type=draft_budget, default="auto", metavar="N", help=help)
    texts = parser.add_argument_group("texts")
    help = "a text before the prompt: the model reads it, and drafts are copied from it"
    texts.add_argument("--context", type=Path, metavar="FILE", help=help)
    add_sources(texts)
    add = parser.add_argument_group("sampling, as in transformers").add_argument
    add("--do-sample", action="store_true", help="sample instead of taking the most probable token")
    add("--temperature", type=float, metavar="X", help="by default the model's own")
    add("--seed", type=int, metavar="N", help="the same seed gives the same text; by default any")


def add_sources(texts: _ArgumentGroup) -> None:
    """Adds the arguments that name further sources of drafts."""
    add = texts.add_argument
    help = "a text to copy drafts from; the model never sees it; can be repeated"
    add("--reference", type=Path, action="append", metavar="FILE", help=help)
    add("--datastore", metavar="STORE", help="a folder or a Hub id; drafts are looked up in it")
    help = "a folder that keeps answers; this and later calls draft from them"
    add("--cache", type=Path, metavar="PATH", help=help)


def sources(
    args: Namespace, tokenizer: PreTrainedTokenizerBase, stores: Iterable[Datastore] = ()
) -> list[Drafter]:
    """The default drafters, and those of arguments and `stores`; refuses ids of other models."""
    references = [read_text(path, "--reference") for path in args.reference or ()]
    drafters: list[Drafter] = [*default_sources(references or None, tokenizer)]
    if args.datastore is not None:
        stores = Datastore.from_pretrained(args.datastore, tokenizer=tokenizer), *stores
    drafters += map(DatastoreDrafts, stores)
    if args.cache is not None:
        if args.cache.is_file():
            raise ValueError(f"--cache {args.cache} is a file; name a folder, or a new one")
        drafters.append(SessionDrafts(tokenizer=tokenizer, path=args.cache))
    vocab_size = text_config(load_config(args.model)).vocab_size
    for drafter in drafters:
        drafter.check(vocab_size)
    return drafters


def _decoding_options(args: Namespace) -> dict[str, Any]:
    """Checks the sampling options, sets the seed, and returns arguments of `generate`."""
    options = {"do_sample": args.do_sample, "max_draft_tokens": args.max_draft_tokens}
    for name in ("temperature", "seed"):
        value = getattr(args, name)
        if value is not None and not args.do_sample:
            raise ValueError(f"--{name} {value} has no effect without --do-sample; add it")
    if args.temperature is not None:
        if not args.temperature > 0:
            raise ValueError(f"--temperature {args.temperature} must be above 0")
        options["temperature"] = args.temperature
    if args.seed is not None:
        try:
            torch.manual_seed(args.seed)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"--seed {args.seed} must fit into 64 bits") from error
    return options


def generate(args: Namespace) -> None:
    """Streams the text to stdout, and prints the statistics to stderr."""
    options = _decoding_options(args)
    context = args.context and read_text(args.context, "--context")
    prompt = prompts.with_document(context, _prompt(args))
    tokenizer = load_tokenizer(args.model)
    drafter = Blend(sources(args, tokenizer))
    added = tokenizer.added_tokens_decoder.values()
    special = {token.content for token in added if token.special} | {*tokenizer.all_special_tokens}
    if any(token in prompt for token in special):  # it is in a template already
        inputs = prompts.text_inputs(tokenizer, prompt)
    else:
        inputs = prompts.chat_inputs(tokenizer, [prompts.user(prompt)])
    config = load_config(args.model)
    hint = "shorten it, or choose a --model with a longer context"
    max_new_tokens = prompts.tokens_left(inputs, config, "the prompt", hint, args.max_new_tokens)
    model = load_model(args.model, args.device_map, args.dtype)
    model.generate(
        **inputs.to(model.device),
        **options,
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        candidate_generator=drafter,
    )
    print(drafter.stats, file=sys.stderr)


def _prompt(args: Namespace) -> str:
    if args.reference and args.prompt is not None and os.path.isfile(args.prompt):
        raise ValueError(f"the prompt {args.prompt!r} is a file: give '<' or --reference before it")
    if args.prompt is None and sys.stdin.isatty():
        print("Type the prompt, and end it with Ctrl-D on a line of its own.", file=sys.stderr)
    try:
        prompt = sys.stdin.read() if args.prompt is None else args.prompt
        prompt.encode()  # fails for bytes that are not UTF-8, which Python reads as surrogates
    except UnicodeError as error:
        raise ValueError(f"the prompt is not a text in UTF-8: {error}") from error
    if not prompt.strip():
        raise ValueError("the prompt is empty; give one: an argument or stdin")
    return prompt


def chat(args: Namespace) -> None:
    options = {**_decoding_options(args), "max_new_tokens": args.max_new_tokens}
    context = args.context and read_text(args.context, "--context")
    tokenizer = load_tokenizer(args.model)
    hint = f"hf-refspec generate --model {args.model} continues a text as it is"
    prompts.check_chat_template(tokenizer, args.model, hint)
    opening = [] if args.system is None else [prompts.system(args.system)]
    try:
        beginning = prompts.chat_inputs(tokenizer, [*opening, prompts.user(context or "")])
    except ValueError as error:
        hint = "leave out --system" if opening else "choose another --model"
        raise ValueError(f"{error}; {hint}") from error
    noun = "--system" if context is None else f"--context {args.context}"
    prompts.tokens_left(beginning, load_config(args.model), noun, "shorten it", 1)
    drafter = LiveDrafts(sources(args, tokenizer))
    model = load_model(args.model, args.device_map, args.dtype)
    drafting_kernels.compile()
    TerminalChat(model, tokenizer, drafter, Terminal(), options, context, opening).converse()


@dataclass
class TerminalChat:
    """A conversation: each line of the standard input is a message."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: LiveDrafts
    console: Terminal
    options: dict[str, Any]  # of `generate`
    document: str | None = None  # precedes the first message
    opening: list[prompts.Message] = field(default_factory=list)  # the system message, if any
    messages: list[prompts.Message] = field(default_factory=list)
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
                self.messages = []
            elif line.startswith("/"):
                self.console.print(_HELP)
            elif line:
                self._answer(line)

    def _answer(self, question: str) -> None:
        """Streams an answer, which stays in the conversation even if Ctrl-C cuts it off."""
        noun = "this message"
        hint = "shorten it"
        if self.messages:
            noun = "this conversation"
            hint = "/reset begins a new one"
        else:
            question = prompts.with_document(self.document, question)
        messages = [*self.messages, prompts.user(question)]
        wanted = self.options["max_new_tokens"]
        try:
            inputs = prompts.chat_inputs(self.tokenizer, [*self.opening, *messages])
            fitting = prompts.tokens_left(inputs, self.model.config, noun, hint, wanted)
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
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        self.messages = [*messages, prompts.assistant(text)]

    def _decode(self, inputs: BatchEncoding, max_new_tokens: int) -> list[int]:
        """Streams an answer, up to Ctrl-C; returns its ids."""
        stream = AnswerStream(self.console, self.tokenizer)
        ids: list[int] = []

        def put(tokens: Sequence[int], owners: Sequence[int | None]) -> None:
            ids.extend(tokens)
            stream.put(tokens, owners)

        self.drafter.listener = put
        options = {**self.options, "max_new_tokens": max_new_tokens}
        note = ""
        try:
            output = self.model.generate(**inputs, **options, candidate_generator=self.drafter)
            ids = output[0, inputs["input_ids"].shape[1] :].tolist()
            if len(ids) == max_new_tokens:
                note = f"stopped after {counted(max_new_tokens, 'token')}"
        except KeyboardInterrupt:
            note = "stopped"
        stream.end()
        if note and ids:
            self._note(note)
        return ids

    def _note(self, text: str) -> None:
        self.console.print(Text(f"({text})", "dim"))
