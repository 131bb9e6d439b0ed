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


SECONDS = {"mutate": 20, "kill": 60, "decode": 120}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("command", choices=SECONDS)
    add = parser.add_argument
    add("--count", type=int, help="how many (10,000; 500 kills)")
    add("--first", type=int, default=0, help="mutate, decode: the number of the first one")
    add("--kind", action="append", help="mutate: only these, such as 'datastore'")
    add("--seconds", type=float, help="how long one may take")
    options = parser.parse_args()
    options.count = options.count or (500 if options.command == "kill" else 10_000)
    options.seconds = options.seconds or SECONDS[options.command]
    with tempfile.TemporaryDirectory() as root:
        return report(results(Path(root), options))


def results(root: Path, options: argparse.Namespace) -> Iterator[Result]:
    from . import decoding, kills, mutations, stores

    numbers = range(options.first, options.first + options.count)
    if options.command == "mutate":
        kinds = [kind for kind in stores.KINDS if kind.name in (options.kind or [kind.name])]
        return mutations.run_all(numbers, root, kinds, options.seconds)
    if options.command == "kill":
        return kills.run_all(options.count, root, kills.all_writers(), options.seconds)
    return decoding.run_all(numbers, root, options.seconds)


def report(results: Iterator[Result]) -> int:
    """Prints what ended badly, and how often what ended how. Ctrl-C ends it."""
    from tqdm import tqdm

    from .children import table

    begin, found = time.monotonic(), []
    with suppress(KeyboardInterrupt):
        for result in tqdm(results, disable=None):
            found.append(result)
            if result.outcome.is_bad:
                what = f"{result.item}: {result.said[0]}, {result.said[2]}"
                print(f"{what}: {result.outcome.name}\n    {result.outcome.detail}\n", flush=True)
    print(table(found), table(found, row=1), sep="\n\n")
    bad = sum(result.outcome.is_bad for result in found)
    seconds = time.monotonic() - begin
    print(f"\n{bad:,} of {len(found):,} ended as they may not, in {seconds:.0f} s")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
