"""`hf-refspec generate`: continues or answers a prompt, with drafts from texts."""

import os
import sys
from argparse import ArgumentParser, Namespace

from transformers import TextStreamer

from ...drafting.blend import Blend
from ..shared import prompts
from ..shared.loading import load_config, load_model, load_tokenizer
from .arguments import add_answering, decoding_options, read_text, sources


def add_generate(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("prompt", nargs="?", help="the prompt; read from the standard input if left out")
    add_answering(parser, max_new_tokens=256)


def generate(args: Namespace) -> None:
    """Streams the text to stdout, and prints the statistics to stderr."""
    options = decoding_options(args)
    context = args.context and read_text(args.context, "--context")
    prompt = prompts.with_document(context, _prompt(args))
    tokenizer = load_tokenizer(args.model)
    new_drafters = sources(args, tokenizer)
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
    drafter = Blend(new_drafters(model))
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
