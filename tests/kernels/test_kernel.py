"""How kernels are compiled."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hf_refspec.drafting.tree import tree_depths
from hf_refspec.kernels import kernel as kernels


def test_arguments_of_other_types_are_refused_rather_than_compiled_for():
    with pytest.raises(TypeError):
        tree_depths(np.zeros(2, np.float64))


@pytest.fixture
def uncompiled(monkeypatch):
    """A new kernel, the only one; it has no source file, so numba keeps no cache of it."""
    monkeypatch.setattr(kernels, "_kernels", [])
    namespace = {}
    exec("def add(a, b): return a + b", namespace)
    return kernels.kernel("int64(int64, int64)")(namespace["add"])


def test_an_interpreted_kernel_is_run_by_python_until_it_is_compiled(monkeypatch):
    parents = np.array([-1, 0, 0, 2], np.int32)
    compiled = tree_depths(parents)
    monkeypatch.setattr(tree_depths, "_compiled", None)
    assert tree_depths(parents).tolist() == compiled.tolist()
    assert tree_depths._compiled is None


def test_what_the_cache_lacks_can_be_refused_instead_of_compiled(uncompiled):
    with pytest.raises(kernels.NotCachedError):
        kernels.compile_all([uncompiled], cached_only=True)
    assert kernels.compile_all([uncompiled]) == 1
    assert kernels.compile_all([uncompiled], cached_only=True) == 0  # it is there


def test_the_call_that_waits_for_the_compiler_says_so_once(caplog, uncompiled):
    with caplog.at_level(logging.INFO, logger="hf_refspec"):
        assert uncompiled(2, 3) == 5
        assert uncompiled(3, 3) == 6
    assert [record.name for record in caplog.records] == ["hf_refspec"]
    assert "hf_refspec.warmup()" in caplog.text
    caplog.clear()
    assert kernels.compile_all([kernels.kernel("int64(int64, int64)")(uncompiled.python)]) == 1
    assert not caplog.records  # nor does a kernel that was compiled ahead of time


LONELY = """

import numpy as np

@kernel("int32[::1](int32[::1])")
def doubled(numbers):
    return numbers * np.int32(2)
"""


def test_kernels_work_where_no_cache_folder_can_be_written(tmp_path):
    source = Path(kernels.__file__).read_text(encoding="utf-8")
    (tmp_path / "lonely.py").write_text(source + LONELY, encoding="utf-8")
    for occupied in ("__pycache__", "home"):  # files, where numba wants to make folders
        (tmp_path / occupied).touch()
    program = (
        "import lonely, numpy as np\n"
        "assert lonely.compile_all([lonely.doubled]) == 1\n"
        "print(lonely.doubled(np.array([1, 2], np.int32)).tolist())"
    )
    home = str(tmp_path / "home")
    environment = {**os.environ, "HOME": home, "XDG_CACHE_HOME": home}
    environment.pop("NUMBA_CACHE_DIR", None)
    captured = {"capture_output": True, "text": True}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=tmp_path, env=environment, **captured)
    assert (run.stdout, run.stderr) == ("[2, 4]\n", "")
