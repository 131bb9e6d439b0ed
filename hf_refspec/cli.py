"""`hf-refspec`: the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 1 if it did not hold, 2 for bad input."""
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except (OSError, ValueError) as error:
        print(f"hf-refspec: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-refspec", description="Lossless speculative decoding by look-up."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="complete and edit Python files, plainly and drafted")
    demo.add_argument("--file", type=Path, help="your own file instead of standard library files")
    demo.add_argument("--model", help="a folder or a Hub id instead of the bundled model")
    demo.add_argument("--max-new-tokens", type=_positive, default=160, metavar="N")
    demo.add_argument("--no-color", action="store_true")
    demo.set_defaults(command=_demo)

    generate = commands.add_parser("generate", help="generate text, drafting from references")
    generate.add_argument("--model", required=True, help="a folder or a Hub id")
    generate.add_argument("--prompt-file", required=True, type=Path)
    generate.add_argument(
        "--reference", nargs="+", type=Path, default=[], metavar="FILE", help="texts to copy from"
    )
    generate.add_argument("--max-draft-tokens", type=int, metavar="N")
    generate.add_argument("--max-new-tokens", type=_positive, default=256, metavar="N")
    generate.set_defaults(command=_generate)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but is {number}")
    return number


def _demo(options: argparse.Namespace) -> int:
    from .demo.run import run_demo  # here: torch takes seconds to load, and --help should not

    color = False if options.no_color else None
    same = run_demo(options.file, options.model, options.max_new_tokens, color)
    return 0 if same else 1


def _generate(options: argparse.Namespace) -> int:
    prompt = options.prompt_file.read_text(encoding="utf-8")
    references = [path.read_text(encoding="utf-8") for path in options.reference]

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

    from . import ReferenceCopy

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    drafter = ReferenceCopy(references or None, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    model.generate(
        **inputs,
        max_new_tokens=options.max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        candidate_generator=drafter,
        max_draft_tokens=options.max_draft_tokens,
    )
    print(drafter.stats, file=sys.stderr)
    return 0
