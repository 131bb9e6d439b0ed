"""`hf-refspec generate`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from transformers import BatchEncoding, PreTrainedTokenizerBase, TextStreamer

from ...drafting.blend import Blend
from ..shared.loading import load_config, load_model, load_tokenizer
from ..shared.prompts import question_inputs, text_inputs, tokens_left, with_document
from .answering import (
    add_answering,
    decoding_options,
    quieten_transformers,
    read_context,
    read_text,
    sources,
)


def add_generate(parser: ArgumentParser) -> None:
    parser.set_defaults(run=_generate)
    add = parser.add_argument
    add("prompt", nargs="?", help="the prompt; without it --prompt-file, or the standard input")
    add("--prompt-file", type=Path, metavar="FILE")
    add_answering(parser, max_new_tokens=256)


def _generate(args: Namespace) -> int:
    """Streams the text to stdout, and prints the statistics to stderr."""
    quieten_transformers()
    options = decoding_options(args)
    context, prompt = read_context(args), _prompt(args)
    if context is not None:
        prompt = with_document(context, prompt)
    tokenizer = load_tokenizer(args.model)
    drafter = Blend(sources(args, tokenizer))
    inputs = _inputs(prompt, tokenizer)
    config = load_config(args.model)
    hint = "shorten it, or choose a --model with a longer context"
    max_new_tokens = tokens_left(inputs, config, "the prompt", hint, args.max_new_tokens)
    model = load_model(args.model, args.device_map, args.dtype)
    model.generate(
        **inputs.to(model.device),
        **options,
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        candidate_generator=drafter,
    )
    print(drafter.stats, file=sys.stderr)
    return 0


def _prompt(args: Namespace) -> str:
    """The prompt, from the argument, its file or the standard input."""
    if args.prompt is not None and args.prompt_file is not None:
        raise ValueError(
            f"give a prompt or --prompt-file, not both: {args.prompt!r} and {args.prompt_file}"
        )
    if args.prompt_file is not None:
        return read_text(args.prompt_file, "--prompt-file")
    if args.prompt is None and sys.stdin.isatty():
        print("Type the prompt, and end it with Ctrl-D on a line of its own.", file=sys.stderr)
    try:
        prompt = sys.stdin.read() if args.prompt is None else args.prompt
        prompt.encode()  # fails at bytes that are not UTF-8, which Python has as surrogates
    except UnicodeError as error:
        raise ValueError(f"the prompt is not a text in UTF-8: {error}") from error
    if not prompt.strip():
        raise ValueError("the prompt is empty; give one: an argument, --prompt-file or stdin")
    return prompt


def _inputs(prompt: str, tokenizer: PreTrainedTokenizerBase) -> BatchEncoding:
    """The prompt in the chat template, unless there is none or the prompt is in one already."""
    added = tokenizer.added_tokens_decoder.values()
    special = {token.content for token in added if token.special} | {*tokenizer.all_special_tokens}
    templated = any(token in prompt for token in special)
    return (text_inputs if templated else question_inputs)(tokenizer, prompt)
