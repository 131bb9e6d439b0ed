"""The text of the demo: the Python standard library, and the edit task made out of it.

The bundled model is trained on nine tenths of the library's files. Which tenth is held out is
decided by a hash of each file's path inside the library, so every machine holds out the same files
and the demo can run on text that the model has never seen.
"""

import ast
import builtins
import hashlib
import keyword
import re
import sysconfig
import tokenize
import warnings
from pathlib import Path

# Tests and character tables are not ordinary code; the last two hold one machine's build settings.
_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "__pycache__",
}
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
_NOT_RENAMED = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "self", "cls"}


def library_root() -> Path:
    """Returns the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def library_files() -> list[Path]:
    """Lists the library's source files in a fixed order, each distinct text once."""
    root = library_root()
    seen: set[bytes] = set()
    files = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        parts = path.relative_to(root).parts
        if _SKIPPED_FOLDERS.intersection(parts) or parts[0].startswith(_SKIPPED_PREFIXES):
            continue
        digest = hashlib.sha256(path.read_bytes()).digest()
        if digest not in seen:
            seen.add(digest)
            files.append(path)
    return files


def training_files() -> list[Path]:
    """Lists the files that the bundled model is trained on."""
    return [path for path in library_files() if not _is_held_out(path)]


def heldout_files() -> list[Path]:
    """Lists the files that the bundled model has never seen, about a tenth of the library."""
    return [path for path in library_files() if _is_held_out(path)]


def _is_held_out(path: Path) -> bool:
    name = path.relative_to(library_root()).as_posix()
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 10 == 0


def read_source(path: Path) -> str:
    """Reads a source file in the encoding that it declares."""
    with tokenize.open(path) as file:
        return file.read()


def top_level_blocks(source: str) -> list[str]:
    """Splits a module into its top-level statements, each with the lines above it.

    Args:
        source: The text of a module.

    Returns:
        The blocks in order; joined, they are the text up to the end of the last statement. Empty
        if the text does not parse.
    """
    tree = _parse(source)
    if tree is None:
        return []
    # Not str.splitlines(): unlike Python's own lines, its lines also end at form feeds.
    lines = [line + "\n" for line in source.split("\n")]
    blocks = []
    start = 0
    for statement in tree.body:
        end = statement.end_lineno or statement.lineno
        if end > start:  # Two statements can share a line.
            blocks.append("".join(lines[start:end]))
            start = end
    return blocks


def renamable_identifiers(piece: str) -> list[str]:
    """Lists the identifiers, used at least twice, that an edit can rename.

    Args:
        piece: A few whole top-level blocks.

    Returns:
        Names of functions, classes, arguments and variables in alphabetical order.
    """
    tree = _parse(piece)
    names: set[str] = set()
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
    words = re.findall(r"\w+", piece)
    return sorted(name for name in names - _NOT_RENAMED if words.count(name) >= 2)


def rename(text: str, old: str, new: str) -> str:
    """Replaces an identifier wherever it stands as a whole word, also in comments and strings."""
    return re.sub(rf"\b{re.escape(old)}\b", new, text)


def rename_prompt(piece: str, old: str, new: str) -> str:
    """Returns the prompt on which the model answers with `rename(piece, old, new)`."""
    return f"{piece}\n# Edit: rename {old} to {new}\n"


def copy_prompt(piece: str) -> str:
    """Returns the prompt on which the model answers with `piece` itself."""
    return f"{piece}\n# Edit: none\n"


def _parse(source: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The library has invalid escape sequences of its own.
        try:
            return ast.parse(source)
        except SyntaxError:
            return None
