"""The tests of what holds on a GPU, on a pretended one, in a process of their own: the device is
there for a whole process, and other tests should not find one."""

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


@pytest.mark.slow
def test_passes_on_the_pretended_device(tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"HF_REFSPEC_DEVICE": "pretended", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-rf"]
    command += ["--basetemp", str(tmp_path / "files"), *map(str, TESTS.glob("test_*_a_gpu.py"))]
    run = subprocess.run(command, env=env, cwd=TESTS.parent, capture_output=True, text=True)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert " passed" in run.stdout.splitlines()[-1]


def test_no_other_test_finds_it():
    assert os.environ.get("HF_REFSPEC_DEVICE") == "pretended" or not hasattr(torch, "pretended")
