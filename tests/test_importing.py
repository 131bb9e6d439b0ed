"""`import hf_refspec` loads the hook; everything else is loaded when it is first used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

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


def test_drafting_for_a_call_loads_no_stored_folder_and_few_files():
    code = (
        "import sys, hf_refspec.generation.speculate\n"
        "names = [name for name in sys.modules if name.partition('.')[0] == 'hf_refspec']\n"
        "print(len(names), [name for name in names if name.startswith('hf_refspec.store')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    count, _, of_stores = run.stdout.strip().partition(" ")
    assert of_stores == "[]" and int(count) <= 68, run.stdout + run.stderr


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


def test_dir_lists_the_public_names_and_no_others():
    assert dir(rs) == sorted(rs.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'hf_refspec' has no attribute 'nothing'"):
        _ = rs.nothing


PACKAGE = Path(rs.__file__).parent
# What each room of the library may import; files beside the rooms are free to all.
ROOMS = {
    "index": set(),
    "store": {"index"},
    "retrieval": {"index", "store"},
    "drafting": {"index", "store"},
    "verification": {"drafting"},
    "generation": {"index", "drafting", "verification"},
    "ralm": {"drafting", "generation", "retrieval", "store", "verification"},
}


def imported_by(file: Path) -> set[str]:
    """The modules of this package that a file imports, without its name: `store.files`."""
    package = file.relative_to(PACKAGE).parts[:-1]
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            module = [*package[: len(package) + 1 - node.level], node.module or node.names[0].name]
            modules.add(".".join(module))
    return modules


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_of_the_library_import_one_way(room):
    others = {*ROOMS, "apps"} - ROOMS[room] - {room}
    files = sorted((PACKAGE / room).rglob("*.py"))
    assert files
    for file in files:
        rooms = {module.partition(".")[0] for module in imported_by(file)}
        assert not rooms & others, file


def test_an_application_imports_the_library_and_what_is_shared_but_no_other():
    apps = {path.name for path in (PACKAGE / "apps").iterdir() if (path / "__init__.py").exists()}
    assert {"cli", "shared"} < apps
    for app in apps - {"cli"}:
        for file in (PACKAGE / "apps" / app).rglob("*.py"):
            imported = {module.split(".")[1] for module in imported_by(file) if "apps." in module}
            assert imported <= {app, "shared"}, file
