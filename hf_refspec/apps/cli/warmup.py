"""`hf-refspec warmup`: compiles all kernels, so that no process has to."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace

from ...generation.warmup import warmup
from ...index.kernels import all_kernels, compile_all
from ...retrieval import bm25 as bm25  # these have kernels of their own
from ...retrieval import flat as flat


def add_warmup(parser: ArgumentParser) -> None:
    parser.set_defaults(run=_warmup)
    parser.epilog = (
        "Compiles the kernels that draft and search into numba's cache: beside the package, or in "
        "the folder that NUMBA_CACHE_DIR names. Run it as the user whose calls need them."
    )


def _warmup(args: Namespace) -> int:
    start = time.perf_counter()
    warmup()
    compile_all(all_kernels())
    kernels = all_kernels()
    print(f"{len(kernels)} kernels are compiled, in {time.perf_counter() - start:.1f} s")
    return 0
