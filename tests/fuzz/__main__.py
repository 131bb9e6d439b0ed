"""The commands, see the package."""

import argparse
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

# Before anything is imported that reads them. Threads that are waited for do not outlive a fork.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

SECONDS = {"mutate": 20, "kill": 60, "decode": 120}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("command", choices=SECONDS)
    add = parser.add_argument
    add("--count", type=int, default=500, help="how many (500)")
    add("--first", type=int, default=0, help="mutate, decode: the number of the first one")
    add("--kind", action="append", help="mutate: only these, such as 'datastore'")
    options = parser.parse_args()
    from tqdm import tqdm

    from . import attacks, decoding, kills, stores
    from .outcomes import table

    numbers, found = range(options.first, options.first + options.count), []
    seconds = SECONDS[options.command]
    with tempfile.TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
        root = Path(folder)
        if options.command == "mutate":
            kinds = [each for each in stores.KINDS if each.name in (options.kind or [each.name])]
            results = attacks.run_all(numbers, root, kinds, seconds)
        elif options.command == "kill":
            results = kills.run_all(options.count, root, [*kills.all_writers()], seconds)
        else:
            results = decoding.run_all(numbers, root, seconds)
        for result in tqdm(results, disable=None):
            found.append(result)
            if result.outcome.is_bad:
                print(result.title, *result.outcome, sep="\n    ", flush=True)
    bad = sum(result.outcome.is_bad for result in found)
    print(table(found), f"{bad:,} of {len(found):,} ended as they may not", sep="\n\n")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
