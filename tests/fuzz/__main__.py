"""The commands, see the package."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

# Before anything is imported that reads them. Threads that are waited for do not outlive a fork.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
sys.path.insert(0, str(Path(__file__).parents[1]))

if TYPE_CHECKING:
    from .children import Result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    commands = parser.add_subparsers(dest="command", required=True)
    for command, (help, seconds, numbers) in {
        "mutate": ("damage folders, then open and use them", 20, {"count": 10_000, "first": 0}),
        "kill": ("kill every writer at its file operations", 60, {"count": 500}),
        "sources": (
            "build from what corpora should not be",
            600,
            {"line-bytes": 200_000_000, "documents": 1_000_000},
        ),
        "decode": (
            "decode with drafts and without, and compare",
            120,
            {"count": 10_000, "first": 0},
        ),
    }.items():
        added = commands.add_parser(command, help=help)
        added.add_argument("--seconds", type=float, default=seconds, help="how long one may take")
        for name, default in numbers.items():
            added.add_argument(f"--{name}", type=int, default=default, help=f"{default:,}")
        if command == "mutate":
            added.add_argument("--kind", action="append", help="only these, such as 'datastore'")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        return report(results(Path(root), arguments), every=arguments.command == "sources")


def results(root: Path, arguments: argparse.Namespace) -> Iterator[Result]:
    if arguments.command in ("mutate", "decode"):
        numbers = range(arguments.first, arguments.first + arguments.count)
    if arguments.command == "mutate":
        from . import fuzzing, stores

        kinds = [kind for kind in stores.KINDS if kind.name in (arguments.kind or [kind.name])]
        yield from fuzzing.run_all(numbers, root, kinds, arguments.seconds)
    elif arguments.command == "decode":
        from . import decoding

        yield from decoding.run_all(numbers, root, arguments.seconds)
    elif arguments.command == "kill":
        from . import kills

        yield from kills.run_all(arguments.count, root, kills.all_writers(), arguments.seconds)
    else:
        from . import sources

        sizes = arguments.line_bytes, arguments.documents
        yield from sources.build_all(root, *sizes, arguments.seconds)


def report(results: Iterator[Result], every: bool) -> int:
    """Prints what ended badly (or everything), and how often what ended how. Ctrl-C ends it."""
    from tqdm import tqdm

    from .children import table

    begin, found = time.monotonic(), []
    with suppress(KeyboardInterrupt):
        for result in tqdm(results, disable=None):
            found.append(result)
            if every or result.outcome.is_bad:
                what = f"{result.item}: {result.said[0]}, {result.said[2]}"
                print(f"{what}: {result.outcome.name}\n    {result.outcome.detail}\n", flush=True)
    print(table(found), table(found, row=1), sep="\n\n")
    bad = sum(result.outcome.is_bad for result in found)
    seconds = time.monotonic() - begin
    print(f"\n{bad:,} of {len(found):,} ended as they may not, in {seconds:.0f} s")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
