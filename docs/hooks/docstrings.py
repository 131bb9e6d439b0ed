"""An extension of griffe: docstrings as transformers writes them become Markdown.

The items of "Args:" and its like become lists, [`Name`] a link to the API reference where that has
the name.
"""

from __future__ import annotations

import re
from inspect import cleandoc
from pathlib import Path
from typing import Any

import griffe

_REFERENCE_PAGES = Path(__file__).parents[1] / "api"
_LISTS = ("Args", "Attributes", "Raises")
_PROSE = ("Returns", "Yields")
_HEADING = re.compile(rf"^({'|'.join(_LISTS + _PROSE)}):\n((?:(?: +.*)?(?:\n|$))*)", re.M)
_ITEM = re.compile(r"^(?=\S)", re.M)  # what goes on with an item is indented
_NAMES = re.compile(r"([\w*, ]+)( \(|:)")
_REFERENCE = re.compile(r"\[`~?([\w.]+)`\](?![\[(])")


class TransformersDocstrings(griffe.Extension):
    """Rewrites each docstring of a package when it has been loaded."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Called by griffe."""
        if pkg.name == "hf_refspec":
            _rewrite(pkg, _documented())


def _documented() -> dict[str, str]:
    """The path of each name that the API reference has."""
    pages = [page.read_text(encoding="utf-8") for page in _REFERENCE_PAGES.glob("*.md")]
    paths = re.findall(r"^::: ([\w.]+)$", "\n".join(pages), re.M)
    return {path.rpartition(".")[2]: path for path in paths}


def _rewrite(obj: griffe.Object | griffe.Alias, documented: dict[str, str]) -> None:
    if obj.is_alias:
        return
    if obj.docstring is not None:
        obj.docstring.value = as_markdown(obj.docstring.value, documented)
    for member in obj.members.values():
        _rewrite(member, documented)


def as_markdown(docstring: str, documented: dict[str, str]) -> str:
    """A docstring as Markdown.

    Args:
        docstring (`str`): Without indentation.
        documented (`dict`): The path of each name that can be linked to.
    """
    text = _HEADING.sub(_section, docstring)
    return _REFERENCE.sub(lambda reference: _link(reference[1], documented), text)


def _section(heading: re.Match[str]) -> str:
    title, block = heading[1], cleandoc(f"\n{heading[2]}")
    if title in _LISTS:
        block = "".join(map(_listed, filter(None, _ITEM.split(block))))
    return f"**{title}**\n\n{block}\n\n"


def _listed(item: str) -> str:
    """An item, "name (type): what it is", as one of a Markdown list."""
    first, _, rest = item.partition("\n")
    names = _NAMES.match(first)
    if names:
        bold = ", ".join(f"**{name}**" for name in names[1].split(", "))
        first = bold + first[names.end(1) :]
    lines = [f"- {first}", *cleandoc(rest).splitlines()]
    return "\n    ".join(lines) + "\n"


def _link(name: str, documented: dict[str, str]) -> str:
    owner, _, member = name.partition(".")
    if owner not in documented:
        return f"`{name}`"
    return f"[`{name}`][{documented[owner]}{'.' if member else ''}{member}]"
