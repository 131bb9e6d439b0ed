"""`hf-refspec demo`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ..demo.run import run_demo
from .arguments import positive


def add_demo(parser: ArgumentParser) -> None:
    """Adds the arguments of `hf-refspec demo`."""
    parser.set_defaults(run=_demo)
    add = parser.add_argument
    add("--file", type=Path, help="your own file instead of standard library files")
    add("--model", help="a folder or a Hub id instead of the bundled model")
    add("--max-new-tokens", type=positive, default=160, metavar="N")
    add("--no-color", action="store_true")
    add(
        "--datastore",
        action="store_true",
        help="draft from a datastore of the standard library as well, which is built first",
    )


def _demo(args: Namespace) -> int:
    color = False if args.no_color else None
    same = run_demo(args.file, args.model, args.max_new_tokens, color, args.datastore)
    return 0 if same else 1
