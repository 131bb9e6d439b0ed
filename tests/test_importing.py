"""`import hf_refspec` loads the hook; everything else is loaded when it is first used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hf_refspec as rs


def test_loads_neither_compiled_kernels_nor_retrieval():
    code = (
        "import sys, hf_refspec\n"
        "print([name for name in sys.modules if name.startswith(('hf_refspec.ralm', "
        "'hf_refspec.index', 'hf_refspec.store', 'hf_refspec.retrieval', 'numba'))])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stderr


LATER = """
import sys, hf_refspec
assert hf_refspec.is_installed() and "transformers" not in sys.modules
{between}
from transformers import GenerationMixin
wrapped = GenerationMixin.generate.__code__.co_name == "generate_speculatively"
print(wrapped, hf_refspec.is_installed())
"""


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        ("", "True True"),
        ("hf_refspec.uninstall()", "False False"),
        ("import importlib.util as u; u.find_spec('transformers.generation.utils')", "True True"),
    ],
)
def test_generate_is_wrapped_when_transformers_is_imported(between, expected):
    code = LATER.format(between=between)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == expected, run.stderr


@pytest.mark.parametrize("name", rs.__all__)
def test_every_public_name_is_there(name):
    assert getattr(rs, name) is not None
    assert name in dir(rs)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'hf_refspec' has no attribute 'nothing'"):
        _ = rs.nothing
