"""The tests of what holds on a GPU, on a pretended one, in processes of their own: the device is
there for a whole process, and other tests should not find one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
_HEADER = Path(sysconfig.get_path("include")) / "Python.h"
MISSING = [
    *(name for name in ("ninja", os.environ.get("CXX", "c++")) if shutil.which(name) is None),
    *([] if _HEADER.exists() else [_HEADER.name]),
]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING)} missing, which builds the pretended device"
)
# About equally long, for two workers.
PROCESSES = [
    ["test_traffic_with_a_gpu.py"],
    ["test_on_a_gpu.py", "test_calls_on_a_gpu.py", "test_manners_of_a_gpu.py"],
]


@pytest.mark.slow
@pytest.mark.parametrize("files", PROCESSES, ids=" and ".join)
def test_passes_on_the_pretended_device(files, tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"HF_REFSPEC_DEVICE": "pretended", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-rf"]
    command += ["--basetemp", str(tmp_path / "files"), *(str(TESTS / file) for file in files)]
    run = subprocess.run(command, env=env, cwd=TESTS.parent, capture_output=True, text=True)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert " passed" in run.stdout.splitlines()[-1]


def test_no_other_test_finds_it():
    assert os.environ.get("HF_REFSPEC_DEVICE") == "pretended" or not hasattr(torch, "pretended")
