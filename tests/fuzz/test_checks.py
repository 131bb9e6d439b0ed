"""The checks of this folder, each file in a process of its own.

They fork: in a process in which other tests have left threads, a fork may wait for a lock that none
of its own threads will ever let go of.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["fuzzing", "kills", "sources"])
def test_in_a_process_of_its_own(name, tmp_path):
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={tmp_path / 'tmp'}"]
    command = [sys.executable, "-m", "pytest", *options, HERE / f"{name}_checks.py"]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
