"""`hf-refspec check`: how drafts are verified for a model, and their cost."""

from argparse import ArgumentParser, Namespace

from ...model_check import check as checked
from ..shared.loading import load_model
from .arguments import add_model, positive


def add_check(parser: ArgumentParser) -> None:
    add_model(parser)
    help = "tokens of context in the timed forward passes"
    add = parser.add_argument
    add("--context", nargs="+", type=positive, default=[256], metavar="N", help=help)


def check(args: Namespace) -> None:
    model = load_model(args.model, args.device_map, args.dtype)
    for context in args.context:
        print(checked(model, context), flush=True)
