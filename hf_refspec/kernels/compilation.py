"""The kernels that draft: compiled ahead of time, or in the background.

Compiling all of them takes half a minute of a core, once for each installation; from numba's cache
it takes each later process half a second.

- `drafting_kernels.compile()` waits until they are compiled: `warmup()`, `check()`, the commands.
- `drafting_kernels.ready()` never waits for more than the cache. Each call of `generate` asks it
  after its tokens, and drafts once it is true. Where the cache lacks kernels, another process
  compiles them, and the call decodes plainly meanwhile. A thread could not do it: numba's compiler
  holds the interpreter's lock, which every operation of the model needs. The process starts when
  the call ends, or at once if torch leaves a core free.
- A kernel that is called earlier, as by a test, compiles its file's, and the caller waits.
- Where `NUMBA_DISABLE_JIT` is set, they are never ready, and calls decode plainly.
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from importlib import import_module
from pkgutil import iter_modules
from time import monotonic

from filelock import FileLock

from .kernel import Kernel, NotCachedError, all_kernels, compile_all, jit_is_disabled
from .narrow_attention import narrow_attention

logger = logging.getLogger("hf_refspec")

# The modules above this one that have kernels, besides all of `index`.
_MODULES = ("drafting.calibration", "drafting.top_tokens", "drafting.tree")

# From its first import on, the other process leaves the processor to the calls that decode
# meanwhile: each of their operations waits for all of torch's threads, so that a thread that shares
# its core slows down all. A process group of its own keeps ctrl-C away; in a session of its own
# Linux would give it half of the processor, whatever its priority. A busy machine may leave it
# nothing, and no process may raise a priority: after `IDLE_SECONDS` another one takes its place,
# which gets a quarter of a core that another thread wants.
IDLE_SECONDS = 20.0
_NICE = 5
_COMPILE = """
import contextlib, os, sys
sys.path[:] = {path!r}
with contextlib.suppress(AttributeError, OSError):  # not on Windows, not in every sandbox
    os.setpgrp()
    os.nice({nice})
    if {idle}:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
from {module} import compile_in_background
compile_in_background({idle})
"""


class DraftingKernels:
    """The kernels that draft, in this process."""

    def __init__(self) -> None:
        self.compiled = False  # as far as `ready` and `compile` know
        self._compiling = threading.Lock()
        self._compilation: subprocess.Popen[bytes] | None = None
        self._idle_since = math.inf
        self._waits_for_end = False  # of a call, before the other process starts
        self._said_disabled = False

    @property
    def why_unready(self) -> str:
        """Why a call could not use them."""
        if jit_is_disabled():
            return "`NUMBA_DISABLE_JIT` is set, so kernels are not compiled; unset it"
        return "the kernels were still being compiled; call `hf_refspec.warmup()` before"

    def _is_disabled(self) -> bool:
        """True if they are not to be compiled; warns of it once."""
        if jit_is_disabled() and not self._said_disabled:
            self._said_disabled = True
            logger.warning("hf_refspec decodes plainly, with no speed-up: %s.", self.why_unready)
        return jit_is_disabled()

    def compile(self) -> None:
        """Compiles all of them: half a minute, once."""
        if self._is_disabled():
            return
        package = __package__.rpartition(".")[0]
        index = import_module(f"{package}.index")
        for name in [
            *_MODULES,
            *(f"index.{module.name}" for module in iter_modules(index.__path__)),
        ]:
            import_module(f"{package}.{name}")
        try:
            compile_all(_imported(), cached_only=True)
        except NotCachedError:
            logger.warning("Compiling hf_refspec's kernels, once (half a minute) ...")
            compile_all(_imported())
        self.compiled = True

    def ready(self, in_call: bool = False) -> bool:
        """True if the kernels of all modules that are imported by now are compiled. Compiles them
        if numba's cache has them, in half a second; otherwise another process compiles all: in a
        call that decodes on all cores of this processor, only once the call has ended."""
        if self.compiled:
            compile_all(_imported())  # of what was imported since
            return True
        if self._is_disabled():
            return False
        if in_call and self._waits_for_end:
            return False
        if not self._compiling.acquire(blocking=False):  # another thread does it
            return False
        try:
            if self._compilation is None:
                compile_all(_imported(), cached_only=True)
                self.compiled = True
            elif (status := self._compilation.poll()) is None:
                if monotonic() - self._idle_since > IDLE_SECONDS:
                    self._compilation.kill()  # the next one takes over what it has compiled
                    # It may take as long to end, which no call should wait for.
                    threading.Thread(target=self._compilation.wait, daemon=True).start()
                    self._idle_since = math.inf
                    self._compilation = _start_compilation(idle=False)
            else:
                if status != 0:
                    logger.warning(
                        "Compiling in the background failed, and this call waits while it compiles."
                        " If numba cannot write its cache, let NUMBA_CACHE_DIR name a folder where "
                        "it can."
                    )
                self.compile()
        except NotCachedError:
            import torch  # a call has loaded it; a command that compiles ahead of time need not

            self._waits_for_end = in_call and torch.get_num_threads() >= usable_cores()
            if self._waits_for_end:
                return False
            self._compilation = _start_compilation(idle=True)
            self._idle_since = monotonic()
            if self._compilation is None:
                self.compile()
        finally:
            self._compiling.release()
        return self.compiled


drafting_kernels = DraftingKernels()


def compile_in_background(idle: bool) -> None:
    """Compiles all, in the other process. If several idle ones start together, one compiles; the
    others wait for it, and then find all in the cache."""
    with FileLock(narrow_attention.cache_path / "hf_refspec.lock") if idle else nullcontext():
        drafting_kernels.compile()


def usable_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _imported() -> list[Kernel]:
    """The kernels that draft, of the modules that are imported by now."""
    return [kernel for kernel in all_kernels() if kernel.drafts]


def _start_compilation(idle: bool) -> subprocess.Popen[bytes] | None:
    """Starts the other process; `None` where that is not possible."""
    if getattr(sys, "frozen", False) or not sys.executable:  # it would start the application again
        return None
    # This process's paths alone: `python -c` would add the working directory.
    path = [os.path.abspath(folder) for folder in sys.path if isinstance(folder, str)]
    nice = 19 if idle else _NICE
    program = _COMPILE.format(path=path, module=__name__, idle=idle, nice=nice)
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None
    if idle:
        logger.warning(
            "hf_refspec's kernels are being compiled, once, for about half a minute; until then "
            "calls decode plainly. hf_refspec.warmup() and `hf-refspec warmup` do it ahead of time."
        )
    return process
