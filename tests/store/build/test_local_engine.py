"""The processes that tokenise end when they should."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from hf_refspec.store.build.engine import TokenFormat
from hf_refspec.store.build.local_engine import LocalEngine
from hf_refspec.store.build.source import open_source


def test_a_process_that_fails_is_not_waited_for(tokenizer):
    engine = LocalEngine(TokenFormat("no tokenizer", np.dtype(np.uint16), 65535, 259), 2)
    source = open_source(["a"], tokenizer, 259)
    with pytest.raises(RuntimeError, match="a process that tokenises ended with status 1"):
        list(engine.tokenize(source, 0))
    engine.close()


def test_processes_end_with_the_one_that_started_them(tmp_path, tokenizer):
    content = tokenizer.backend_tokenizer.to_str()
    note = tmp_path / "processes"

    def run():
        engine = LocalEngine(TokenFormat(content, np.dtype(np.uint16), 65535, 259), 2)
        source = open_source((str(i) * 1000 for i in range(10**9)), tokenizer, 259)
        tokens = engine.tokenize(source, 0)
        next(tokens)
        note.write_bytes(pickle.dumps([process.pid for process in engine._processes]))
        os.kill(os.getpid(), signal.SIGKILL)

    def running(process: int) -> bool:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state != "Z"

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    processes = pickle.loads(note.read_bytes())
    assert processes
    end = time.monotonic() + 10
    while any(map(running, processes)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(running, processes))
