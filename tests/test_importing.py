"""`import hf_refspec` loads the hook; everything else is loaded when it is first used."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hf_refspec as rs

LATER = """
import sys, hf_refspec
assert hf_refspec.is_installed() and "transformers" not in sys.modules
{between}
from transformers import GenerationMixin
print(GenerationMixin.generate.__code__.co_name == "generate_speculatively")
"""
LOADED = """
loaded = lambda *names: [name for name in sys.modules if name.startswith(names)]
rooms = tuple(f"hf_refspec.{room}" for room in ("ralm", "index", "corpus", "store", "retrieval"))
print(loaded("numba", *rooms))
import hf_refspec.generation.speculate
print(loaded("hf_refspec.store"), len(loaded("hf_refspec")) <= 68)
import hf_refspec.retrieval.dense, hf_refspec.retrieval.bm25, hf_refspec.ralm.iterative
print(loaded("faiss", "bm25s", "sentence_transformers", "datasets"))
"""


def printed_by(code: str) -> list[str]:
    """What Python prints in another process."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_generate_is_wrapped_when_transformers_is_imported_and_no_more_is_loaded_than_is_used():
    assert printed_by(LATER.format(between="") + LOADED) == ["True", "[]", "[] True", "[]"]


@pytest.mark.parametrize(
    ("between", "wrapped"),
    [
        ("hf_refspec.uninstall()", "False"),
        ("import importlib.util as u; u.find_spec('transformers.generation.utils')", "True"),
    ],
)
def test_what_comes_before_transformers_is_imported(between, wrapped):
    assert printed_by(LATER.format(between=between)) == [wrapped]


@pytest.mark.parametrize("name", rs.__all__)
def test_every_public_name_is_there(name):
    assert getattr(rs, name) is not None


def test_dir_lists_the_public_names_and_an_unknown_one_is_an_attribute_error():
    assert dir(rs) == sorted(rs.__all__)
    with pytest.raises(AttributeError, match="module 'hf_refspec' has no attribute 'nothing'"):
        _ = rs.nothing


PACKAGE = Path(rs.__file__).parent
# What each room of the library may import; files beside the rooms are free to all.
ROOMS = {
    "index": set(),
    "corpus": set(),
    "store": {"index", "corpus"},
    "retrieval": {"index", "corpus", "store"},
    "drafting": {"index", "corpus", "store"},
    "verification": {"index", "drafting"},
    "generation": {"index", "drafting", "verification"},
    "ralm": {"corpus", "drafting", "generation", "retrieval", "store", "verification"},
}


def imported_by(file: Path) -> set[str]:
    """The modules of this package that a file imports, but for hints alone: `store.files`."""
    package = file.relative_to(PACKAGE).parts[:-1]
    modules = set()
    nodes = list(ast.walk(ast.parse(file.read_text())))
    branches = [node for node in nodes if isinstance(node, ast.If)]
    for_hints = [node for node in branches if "TYPE_CHECKING" in ast.dump(node.test)]
    hints = {id(part) for node in for_hints for part in ast.walk(node)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in hints:
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


def test_no_modules_import_one_another_in_a_circle_not_even_inside_of_functions():
    imports = {}
    for file in PACKAGE.rglob("*.py"):
        name = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        imports[name] = imported_by(file)
    TopologicalSorter(imports).prepare()  # which raises a CycleError


def test_an_application_imports_the_library_and_what_is_shared_but_no_other():
    apps = {path.name for path in (PACKAGE / "apps").iterdir() if (path / "__init__.py").exists()}
    assert {"cli", "shared"} < apps
    for app in apps - {"cli"}:
        for file in (PACKAGE / "apps" / app).rglob("*.py"):
            imported = {module.split(".")[1] for module in imported_by(file) if "apps." in module}
            assert imported <= {app, "shared"}, file
