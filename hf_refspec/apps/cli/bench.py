"""`hf-refspec bench`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ...smollm2 import HUB_ID
from ..bench.compare import compare
from ..bench.models import SIZES
from ..bench.registry import SUITES
from ..bench.run import run
from .arguments import DTYPES, add_device_map, draft_budget, positive


def add_bench(parser: ArgumentParser) -> None:
    """Adds the arguments of `hf-refspec bench`."""
    parser.set_defaults(run=_bench)
    add = parser.add_argument
    add("suites", nargs="+", metavar="SUITE", help=f"{', '.join(SUITES)}; or compare A B")
    add_measuring(parser)
    add("--methods", nargs="+", metavar="NAME", help="only these, by their names in the report")
    add(
        "--nodes",
        nargs="+",
        type=draft_budget,
        metavar="N",
        help="draft budgets; default: auto 8 16 64",
    )
    add("--temperature", type=float, metavar="T", help="sample, with one seed for all methods")
    add("--batch-size", type=positive, metavar="N", help="spec-bench: so many questions at a time")
    add(
        "--static",
        type=positive,
        metavar="LENGTH",
        help="measure compiled static caches too, for LENGTH tokens of prompt and answer",
    )
    add("--recycling-table", metavar="TABLE", help="a folder or a Hub id, to start from as well")
    add("--datastore", help="a folder or a Hub id, to draft from as well")


def add_measuring(parser: ArgumentParser) -> None:
    """Adds the arguments that the scripts in benchmarks/ have too."""
    add = parser.add_argument
    add("--out", type=Path, help="a new folder for results, report and plots")
    add("--data", type=Path, help="the folder with the data files")
    add("--limit", type=positive, metavar="N", help="only the first N questions of each suite")
    add("--model", help=f"a folder or a Hub id; default: {HUB_ID}")
    add("--random-model", choices=tuple(SIZES), help="a random Llama of that size instead")
    add("--tokenizer", help="for the random model; default: the default model's")
    add("--replay", action="store_true", help="force the recorded answers")
    add("--max-new-tokens", type=positive, metavar="N", help="default: 256, in a replay all")
    add("--device", choices=("cpu", "cuda"))
    add_device_map(parser)
    add("--dtype", nargs="+", choices=DTYPES, help="one or several, each measured")


def _bench(args: Namespace) -> int:
    if args.suites[0] == "compare":
        print(compare(args.suites[1:]))
        return 0
    return run(args)
