"""`hf-refspec warmup`: compiles kernels ahead of time."""

import time
from argparse import ArgumentParser, Namespace

from ...kernels.compilation import drafting_kernels
from ...kernels.kernel import all_kernels, compile_all, jit_is_disabled
from ...retrieval import bm25 as bm25  # these have kernels of their own
from ...retrieval import vector_index as vector_index
from ...warm_up import warmup as warm_up

EPILOG = (
    "Compiles the kernels that draft and search into numba's cache: beside the package, or in "
    "the folder that NUMBA_CACHE_DIR names. Run it as the user whose calls need them."
)


def add_warmup(_parser: ArgumentParser) -> None:
    """It has no arguments."""


def warmup(_args: Namespace) -> None:
    if jit_is_disabled():
        raise ValueError(drafting_kernels.why_unready)
    start = time.perf_counter()
    warm_up()
    compile_all(all_kernels())
    print(f"{len(all_kernels())} kernels are compiled, in {time.perf_counter() - start:.1f} s")
