"""How calls go on while kernels are compiled, each in a process of its own with an empty cache."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hf_refspec.drafting.compilation import DraftingKernels
from hf_refspec.index import kernels

# Prints the tokens of calls, whether they drafted, and how long they took.
PROGRAM = """
import logging, os, time, torch
from pathlib import Path
torch.set_num_threads(1)
import hf_refspec as rs
from architectures import small
from hf_refspec.drafting import compilation
from hf_refspec.drafting.compilation import drafting_kernels
model, prompt = small("llama"), torch.tensor([[5, 6, 7, 8] * 4])
def generate(**options):
    ids = model.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None, **options)
    return ids.tolist()
plain, drafter = generate(), rs.ReferenceCopy() | rs.TokenRecycling()
options = {"candidate_generator": drafter, "max_draft_tokens": 8}
"""
FIRST = """
assert generate(**options) == plain
assert drafter.stats.forward_passes == 40, drafter.stats
assert drafter.stats.drafted == 0 and not drafting_kernels.compiled
def wait_until(condition):  # while a process compiles, however long that takes
    while True:
        compiles = drafting_kernels._compilation.poll() is None
        if condition():
            return
        assert compiles, "what is waited for will not come"
        time.sleep(0.5)
def compiled():
    files = Path(os.environ["NUMBA_CACHE_DIR"]).rglob("*.nbc")
    return {path: path.stat().st_mtime_ns for path in files}
def children():
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
idle = drafting_kernels._compilation.pid
wait_until(lambda: os.sched_getscheduler(idle) == os.SCHED_IDLE)
# A busy machine would leave it nothing.
os.sched_setscheduler(idle, os.SCHED_OTHER, os.sched_param(0))
wait_until(compiled)
compilation.IDLE_SECONDS = 0
assert not drafting_kernels.ready()
first, hurried = compiled(), drafting_kernels._compilation.pid
wait_until(lambda: children() == {str(hurried)} and len(compiled()) > len(first))
assert os.getpriority(os.PRIO_PROCESS, hurried) == os.getpriority(os.PRIO_PROCESS, 0)
assert os.sched_getscheduler(hurried) == os.sched_getscheduler(0) != os.SCHED_IDLE
wait_until(drafting_kernels.ready)
assert not children() and compiled().items() > first.items(), "the first one's work is kept"
assert generate(**options) == plain
assert drafter.stats.forward_passes < 40, drafter.stats
"""
SECOND = """
assert not drafting_kernels.compiled
assert generate(**options) == plain
assert drafter.stats.forward_passes < 40, drafter.stats
first = drafter.stats.drafted, drafter.stats.accepted
drafter = rs.ReferenceCopy() | rs.TokenRecycling()
assert generate(**{**options, "candidate_generator": drafter}) == plain
assert (drafter.stats.drafted, drafter.stats.accepted) == first, "a late beginning drafts the same"
"""


def run(program: str, folder) -> str:
    """Runs it with numba's cache in a folder; returns what it logs."""
    here = os.path.dirname(os.path.dirname(__file__))
    paths = [here, *filter(None, sys.path)]
    environment = {"NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", PROGRAM + program]
    process = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return process.stderr


@pytest.mark.slow
def test_a_first_call_decodes_plainly_and_a_second_process_drafts_at_once(tmp_path):
    logged = run(FIRST, tmp_path)
    assert logged.count("kernels are being compiled") == 1
    assert "compile" not in run(SECOND, tmp_path)


def test_what_another_process_could_not_compile_is_compiled_by_the_call(caplog):
    waiting = DraftingKernels()
    waiting._compilation = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    waiting._compilation.wait()
    assert waiting.ready()
    assert "NUMBA_CACHE_DIR" in caplog.text


def test_one_thread_compiles_and_others_do_not_wait_for_it():
    waiting = DraftingKernels()
    with waiting._compiling:
        assert not waiting.ready()
    assert waiting.ready()


def test_the_kernels_of_retrievers_are_no_part_of_it(monkeypatch):
    compiled = []
    monkeypatch.setattr(
        kernels.Kernel, "_compile", lambda each, cached_only: compiled.append(each) or False
    )
    DraftingKernels().compile()
    assert set(compiled) == {each for each in kernels.all_kernels() if each.drafts}
    names = {each.python.__name__ for each in compiled}
    assert names > {"copy_tree", "llma_span", "grow_trie", "look_up", "merge_trees", "calibrate"}
