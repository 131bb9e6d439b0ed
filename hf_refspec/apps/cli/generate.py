"""`hf-refspec generate`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from pathlib import Path

from transformers import BatchEncoding, PreTrainedTokenizerBase, TextStreamer

from ...drafting.blend import Blend
from ..shared.default_model import load_config, load_model, load_tokenizer
from ..shared.prompts import (
    chat_inputs,
    check_chat_template,
    text_inputs,
    tokens_left,
    user,
    with_document,
)
from .answering import (
    add_answering,
    quieten_transformers,
    read_text,
    read_texts,
    sampling_options,
    sources,
)


def _draft_tokens(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal():
        raise ArgumentTypeError(f"must be a number from 0 on, or auto, but is {text!r}")
    return int(text)


def add_generate(parser: ArgumentParser) -> None:
    """Adds the arguments of `hf-refspec generate`."""
    parser.set_defaults(run=_generate)
    add = parser.add_argument
    add("prompt", nargs="?", help="the prompt; without it --prompt-file, or the standard input")
    add("--prompt-file", type=Path, metavar="FILE")
    add(
        "--chat",
        action=BooleanOptionalAction,
        help="put the prompt into the model's chat template; by default where there is one and the "
        "prompt has none of its special tokens",
    )
    add_answering(parser, max_new_tokens=256)
    add(
        "--max-draft-tokens",
        type=_draft_tokens,
        default="auto",
        metavar="N",
        help="draft nodes a forward pass, 0 for none; by default as many as pay",
    )


def _generate(args: Namespace) -> int:
    """Streams the text to stdout, and prints the statistics to stderr."""
    quieten_transformers()
    options = sampling_options(args)
    texts = read_texts(args)
    prompt = _prompt(args)
    if texts.context is not None:
        prompt = with_document(texts.context, prompt)
    tokenizer = load_tokenizer(args.model)
    drafter = Blend(sources(args, texts, tokenizer))
    inputs = _inputs(args, prompt, tokenizer)
    config = load_config(args.model)
    way_out = "shorten it, or choose a --model with a longer context"
    max_new_tokens = tokens_left(inputs, config, "the prompt", way_out, args.max_new_tokens)
    model = load_model(args.model)
    model.generate(
        **inputs.to(model.device),
        **options,
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        candidate_generator=drafter,
        max_draft_tokens=args.max_draft_tokens,
    )
    print(drafter.stats, file=sys.stderr)
    return 0


def _prompt(args: Namespace) -> str:
    """The text to go on from.

    Raises:
        OSError: If its file cannot be read.
        ValueError: If there is none, or two, or it is not UTF-8.
    """
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
        prompt.encode()  # Python has bytes that it could not read as surrogates
    except UnicodeError as error:
        raise ValueError(f"the prompt is not a text in UTF-8: {error}") from error
    if not prompt.strip():
        raise ValueError("the prompt is empty; give one: an argument, --prompt-file or stdin")
    return prompt


def _inputs(args: Namespace, prompt: str, tokenizer: PreTrainedTokenizerBase) -> BatchEncoding:
    if args.chat:
        check_chat_template(
            tokenizer, args.model, "leave --chat out to go on from the prompt as it is"
        )
    if args.chat or (args.chat is None and _is_plain(prompt, tokenizer)):
        return chat_inputs(tokenizer, [user(prompt)])
    return text_inputs(tokenizer, prompt)


def _is_plain(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text can be put into a chat template: there is one, and it is not in it already."""
    added = tokenizer.added_tokens_decoder.values()
    special = {token.content for token in added if token.special} | {*tokenizer.all_special_tokens}
    return tokenizer.chat_template is not None and not any(token in text for token in special)
