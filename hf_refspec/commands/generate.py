"""`hf-refspec generate`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from transformers import TextStreamer

from ..demo.default_model import load_model, load_tokenizer
from ..drafting.reference_copy import ReferenceCopy
from .arguments import positive


def _draft_tokens(text: str) -> int | str:
    return text if text == "auto" else int(text)


def add_generate(parser: ArgumentParser) -> None:
    """Adds the arguments of `hf-refspec generate`."""
    parser.set_defaults(run=_generate)
    add = parser.add_argument
    add("--model", required=True, help="a folder or a Hub id")
    add("--prompt-file", type=Path, required=True)
    add("--reference", type=Path, nargs="+", metavar="FILE", help="texts to copy from")
    add("--max-draft-tokens", type=_draft_tokens, default="auto", metavar="N")
    add("--max-new-tokens", type=positive, default=256, metavar="N")


def _generate(args: Namespace) -> int:
    """Streams the text to stdout, and prints the statistics to stderr."""
    prompt = args.prompt_file.read_text(encoding="utf-8")
    references = [path.read_text(encoding="utf-8") for path in args.reference or ()]

    tokenizer = load_tokenizer(args.model)
    drafter = ReferenceCopy(references or None, tokenizer)
    model = load_model(args.model)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    model.generate(
        **inputs.to(model.device),
        max_new_tokens=args.max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        candidate_generator=drafter,
        max_draft_tokens=args.max_draft_tokens,
    )
    print(drafter.stats, file=sys.stderr)
    return 0
