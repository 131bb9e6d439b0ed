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
    mutating = commands.add_parser("mutate", help="damage folders, then open and use them")
    mutating.add_argument("--count", type=int, default=10_000)
    mutating.add_argument("--first", type=int, default=0, help="the number of the first one")
    mutating.add_argument("--seconds", type=float, default=20, help="how long one may take")
    mutating.add_argument("--kind", action="append", help="only these, such as 'datastore'")
    killing = commands.add_parser("kill", help="kill every writer at its file operations")
    killing.add_argument("--count", type=int, default=500)
    killing.add_argument("--seconds", type=float, default=60, help="how long one may take")
    building = commands.add_parser("sources", help="build from what corpora should not be")
    building.add_argument("--line-bytes", type=int, default=200_000_000)
    building.add_argument("--documents", type=int, default=1_000_000)
    building.add_argument("--seconds", type=float, default=600, help="how long one may take")
    decoding = commands.add_parser("decode", help="decode with drafts and without, and compare")
    decoding.add_argument("--count", type=int, default=10_000)
    decoding.add_argument("--first", type=int, default=0, help="the number of the first one")
    decoding.add_argument("--seconds", type=float, default=120, help="how long one may take")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        return COMMANDS[arguments.command](Path(root), arguments)


def mutate(root: Path, arguments: argparse.Namespace) -> int:
    from .fuzzing import Fuzzer
    from .stores import KINDS

    kinds = [kind for kind in KINDS if kind.name in (arguments.kind or [kind.name])]
    fuzzer = Fuzzer(root, kinds, seconds=arguments.seconds)
    return report(fuzzer.run(range(arguments.first, arguments.first + arguments.count)))


def kill(root: Path, arguments: argparse.Namespace) -> int:
    from .kills import Killer

    killer = Killer(root, seconds=arguments.seconds)
    print(f"There are {len(killer.kills):,} places to kill at.", flush=True)
    return report(killer.run(arguments.count))


def sources(root: Path, arguments: argparse.Namespace) -> int:
    from .sources import build_all

    results = build_all(root, arguments.line_bytes, arguments.documents, arguments.seconds)
    return report(results, every=True)


def decode(root: Path, arguments: argparse.Namespace) -> int:
    from .decoding import run_all

    numbers = range(arguments.first, arguments.first + arguments.count)
    return report(run_all(numbers, root, arguments.seconds))


def report(results: Iterator[Result], every: bool = False) -> int:
    """Prints what ended badly (or everything), and how often what ended how. Ctrl-C ends it."""
    from tqdm import tqdm

    from .children import table

    begin, all_results = time.monotonic(), []
    with suppress(KeyboardInterrupt):
        for result in tqdm(results, disable=None):
            all_results.append(result)
            if every or result.outcome.is_bad:
                what = f"{result.rows[0]}, {result.done}: {result.outcome.name}"
                number = f"{result.item}: " if isinstance(result.item, int) else ""
                print(f"{number}{what}\n    {result.outcome.detail.strip()}\n", flush=True)
    print(table(all_results), table(all_results, row=1), sep="\n\n")
    bad = sum(result.outcome.is_bad for result in all_results)
    seconds = time.monotonic() - begin
    print(f"\n{bad:,} of {len(all_results):,} ended as they may not, in {seconds:.0f} s")
    return int(bad > 0)


COMMANDS = {"mutate": mutate, "kill": kill, "sources": sources, "decode": decode}

if __name__ == "__main__":
    sys.exit(main())
