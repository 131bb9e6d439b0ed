"""How calls go on while kernels are compiled."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from numba import config

import hf_refspec as rs
from hf_refspec.kernels import compilation
from hf_refspec.kernels import kernel as kernels
from hf_refspec.kernels.compilation import DraftingKernels
from tests.helpers.architectures import small
from tests.helpers.calls import GREEDY, PROMPT, ListStreamer

# These compile in a few seconds, the others in half a minute.
LACKING = "calibration", "token_buffer", "similar_prompts"
# Runs its arguments one after another, each in a process that has loaded no kernel.
PROGRAM = """
import contextlib, logging, os, sys, time, torch
from pathlib import Path
torch.set_num_threads(1)
import hf_refspec as rs
from tests.helpers.architectures import small
from hf_refspec.kernels import compilation
from hf_refspec.kernels.compilation import drafting_kernels
model, prompt = small("llama"), torch.tensor([[5, 6, 7, 8] * 4])
def generate(**options):
    ids = model.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None, **options)
    return ids.tolist()
plain, drafter = generate(), rs.ReferenceCopy() | rs.TokenRecycling()
options = {"candidate_generator": drafter, "max_draft_tokens": 8}
for program in sys.argv[1:]:
    if not (process := os.fork()):
        exec(program)
        break
    assert os.waitpid(process, 0)[1] == 0
    print("ENDED", file=sys.stderr)
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
        time.sleep(0.05)
def compiled():
    files = Path(os.environ["NUMBA_CACHE_DIR"]).rglob("*.nbc")
    return {path: path.stat().st_mtime_ns for path in files}
def raise_priority(process):  # other tests would leave it little
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, process, 0)
def children():
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
before, idle = compiled(), drafting_kernels._compilation.pid
wait_until(lambda: os.sched_getscheduler(idle) == os.SCHED_IDLE)
assert os.getpriority(os.PRIO_PROCESS, idle) == 19
# A busy machine would leave it nothing.
os.sched_setscheduler(idle, os.SCHED_OTHER, os.sched_param(0))
raise_priority(idle)
wait_until(lambda: len(compiled()) > len(before))
assert len(os.listdir(f"/proc/{idle}/task")) == 1, "it has one thread"
compilation.IDLE_SECONDS = 0
assert not drafting_kernels.ready()
first, hurried = compiled(), drafting_kernels._compilation.pid
wait_until(lambda: children() == {str(hurried)} and len(compiled()) > len(first))
assert os.getpriority(os.PRIO_PROCESS, hurried) == min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19)
assert os.sched_getscheduler(hurried) == os.sched_getscheduler(0) != os.SCHED_IDLE
raise_priority(hurried)
wait_until(drafting_kernels.ready)
assert not children() and compiled().items() > first.items(), "the first one's work is kept"
assert generate(**options) == plain
assert drafter.stats.forward_passes < 40, drafter.stats
"""
SECOND = """
assert not drafting_kernels.compiled
assert generate(**options) == plain
assert drafter.stats.forward_passes < 40, drafter.stats
"""


def copy_cache(folder: Path, monkeypatch) -> None:
    """Copies numba's cache to a folder, but for the files of `LACKING`."""

    def places() -> dict[str, Path]:
        named = [each for each in kernels.all_kernels() if each.drafts]
        return {Path(each.python.__code__.co_filename).stem: each.cache_path for each in named}

    full = places()
    monkeypatch.setattr(config, "CACHE_DIR", str(folder))
    for name, place in places().items():
        place.mkdir(parents=True, exist_ok=True)
        for file in full[name].glob(f"{name}.*.nb?") if name not in LACKING else ():
            shutil.copy(file, place)


def run(folder: Path, *programs: str) -> list[str]:
    """Runs them with numba's cache in a folder; returns what each of them logs."""
    paths = filter(None, sys.path)
    environment = {"NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", PROGRAM, *programs]
    captured = {"capture_output": True, "text": True}
    process = subprocess.run(command, env={**os.environ, **environment}, **captured)
    assert process.returncode == 0, process.stderr
    return process.stderr.split("ENDED\n")[:-1]


@pytest.mark.slow
def test_a_first_call_decodes_plainly_and_a_second_process_drafts_at_once(tmp_path, monkeypatch):
    copy_cache(tmp_path, monkeypatch)
    first, second = run(tmp_path, FIRST, SECOND)
    assert first.count("kernels are being compiled") == 1
    assert "Waited" not in first, "plain decoding needs no kernel"
    assert "compile" not in second


def test_what_another_process_could_not_compile_is_compiled_by_the_call(caplog):
    waiting = DraftingKernels()
    waiting._compilation = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    waiting._compilation.wait()
    assert waiting.ready()
    assert "NUMBA_CACHE_DIR" in caplog.text


@pytest.mark.parametrize(("threads", "starts"), [(3, True), (4, False)])
def test_compilation_begins_in_a_call_that_leaves_a_core_free_and_else_at_its_end(
    monkeypatch, threads, starts
):
    def lacking(*_, **__):
        raise kernels.NotCachedError

    started = []
    monkeypatch.setattr(compilation, "compile_all", lacking)
    running = SimpleNamespace(poll=lambda: None)
    monkeypatch.setattr(
        compilation, "_start_compilation", lambda idle: started.append(idle) or running
    )
    monkeypatch.setattr(compilation, "usable_cores", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    waiting = DraftingKernels()
    for _ in range(3):  # tokens
        assert not waiting.ready(in_call=True)
        assert started == [True] * starts
    assert not waiting.ready()
    assert started == [True]
    assert not waiting.ready(in_call=True) and started == [True]


def test_a_call_on_all_cores_decodes_plainly_and_has_them_compiled_once_it_ends(monkeypatch):
    asked, streamed = [], ListStreamer()

    def ready(kernels, in_call=False):
        asked.append((in_call, len(streamed.puts)))
        return False

    monkeypatch.setattr(compilation.drafting_kernels, "compiled", False)
    monkeypatch.setattr(DraftingKernels, "ready", ready)
    drafter = rs.ReferenceCopy() | rs.TokenRecycling()
    small("llama").generate(PROMPT, candidate_generator=drafter, streamer=streamed, **GREEDY)
    assert asked[0] == (True, 2), "the prompt and the first token wait for nothing"
    assert [in_call for in_call, _ in asked].index(False) == len(asked) - 1
    assert drafter.stats.drafted == drafter.stats.probe_passes == 0


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
