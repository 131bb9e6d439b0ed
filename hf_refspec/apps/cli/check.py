"""`hf-refspec check`: what a model's drafts are verified by, and what they cost."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ...generation.check import check
from ..shared.loading import load_model
from .arguments import add_model, positive


def add_check(parser: ArgumentParser) -> None:
    parser.set_defaults(run=_check)
    add_model(parser)
    parser.add_argument(
        "--context",
        type=positive,
        default=256,
        help="the length in tokens of the text that is timed; 256 by default",
    )


def _check(args: Namespace) -> int:
    model = load_model(args.model, args.device_map, args.dtype)
    print(check(model, args.context))
    return 0
