"""The commands, see the package."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

# Before anything is imported that reads them. Threads that are waited for do not outlive a fork.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
sys.path.insert(0, str(Path(__file__).parents[1]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    commands = parser.add_subparsers(dest="command", required=True)
    mutating = commands.add_parser("mutate", help="damage folders, then open and use them")
    mutating.add_argument("--count", type=int, default=10_000)
    mutating.add_argument("--first", type=int, default=0, help="the number of the first one")
    mutating.add_argument("--seconds", type=float, default=20, help="how long one may take")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        return mutate(Path(root), arguments)


def mutate(root: Path, arguments: argparse.Namespace) -> int:
    from .fuzzing import Fuzzer, table

    fuzzer = Fuzzer(root, seconds=arguments.seconds)
    results, begin = [], time.monotonic()
    for result in fuzzer.run(range(arguments.first, arguments.first + arguments.count)):
        results.append(result)
        if result.outcome.is_bad:
            print(
                f"{result.number} {result.kind}, {result.done}: {result.outcome.name}, "
                f"{result.outcome.detail.strip()}\n",
                flush=True,
            )
    print(table(results), "", table(results, by="mutation"), sep="\n")
    print(f"{len(results):,} mutations in {time.monotonic() - begin:.0f} s")
    return int(any(result.outcome.is_bad for result in results))


if __name__ == "__main__":
    sys.exit(main())
