"""Tokenises and sorts on this machine."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from ...index.suffix_array import build_suffix_array
from . import tokenizing
from .engine import TokenFormat, in_order
from .source import Source, after, batches
from .tokenizing import Document, TokenBatch, encode, load_tokenizer


class LocalEngine:
    """Tokenises in processes of this machine.

    They are programs of their own, not forks of this process nor copies of it: they neither inherit
    its threads nor run its main module again, and need a tenth of its memory. They end when their
    input ends, also if this process is killed.

    Args:
        tokens (`TokenFormat`): What documents become.
        num_proc (`int`, *optional*): How many. With 1 this process itself tokenises.
    """

    def __init__(self, tokens: TokenFormat, num_proc: int | None) -> None:
        self.setup = (tokens.content, tokens.dtype, tokens.separator)
        self.num_proc = num_proc or usable_cores()
        self._idle: queue.SimpleQueue[subprocess.Popen] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen] = []

    def tokenize(self, source: Source, skip: int) -> Iterator[TokenBatch]:
        work = batches(after(source.documents, skip))
        if self.num_proc == 1:
            content, dtype, separator = self.setup
            tokenizer = load_tokenizer(content)
            for batch in work:
                yield encode(tokenizer, batch, dtype, separator)
            return
        threads = ThreadPoolExecutor(self.num_proc)

        def begin(batch: list[Document]) -> Future[TokenBatch]:
            return threads.submit(self._encode, batch)

        try:
            for encoded in in_order(work, begin, 2 * self.num_proc, Future.cancel):
                yield encoded.result()
        finally:
            self.close()  # Else the threads would finish what nobody wants any more.
            threads.shutdown(cancel_futures=True)

    def sort(self, tokens: np.ndarray) -> np.ndarray:
        return build_suffix_array(tokens)  # without the interpreter's lock

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.wait()
        self._processes.clear()

    def _encode(self, batch: list[Document]) -> TokenBatch:
        messages: list[Any] = [batch]
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = self._start()
            messages = [self.setup, batch]
        assert process.stdin and process.stdout
        try:
            for message in messages:
                pickle.dump(message, process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            raise RuntimeError(
                f"a process that tokenises ended with status {process.wait()}; if memory was "
                f"short, take fewer: num_proc={max(1, self.num_proc // 2)}"
            ) from None
        self._idle.put(process)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _start(self) -> subprocess.Popen:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }
        process = subprocess.Popen(
            [sys.executable, tokenizing.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._processes.append(process)
        return process


def usable_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
