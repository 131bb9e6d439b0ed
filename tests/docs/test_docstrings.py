"""Docstrings as the API reference shows them."""

import inspect
import re
import runpy
from pathlib import Path

import pytest

import hf_refspec

EXTENSION = Path(__file__).parents[2] / "docs" / "hooks" / "docstrings.py"
DOCSTRING = """\
See [`Other`] and [`~module.inner`].

Args:
    first (`str`, *optional*):
        In two
        lines.
    second, third: Others, of [`Other.method`].

Returns:
    [`Other`]: All of it.

And more.
"""
MARKDOWN = """\
See [`Other`][package.Other] and `module.inner`.

**Args**

- **first** (`str`, *optional*):
    In two
    lines.
- **second**, **third**: Others, of [`Other.method`][package.Other.method].


**Returns**

[`Other`][package.Other]: All of it.

And more.
"""


def test_sections_become_lists_and_references_links():
    pytest.importorskip("griffe")
    as_markdown = runpy.run_path(str(EXTENSION))["as_markdown"]
    assert as_markdown(DOCSTRING, {"Other": "package.Other"}) == MARKDOWN


def documented(name: str) -> list[str]:
    """The arguments that a docstring lists."""
    docstring = inspect.getdoc(getattr(hf_refspec, name)) or ""
    section = re.search(r"^Args:\n((?:(?: +.*)?\n?)*?)(?=^\S|\Z)", docstring, re.M)
    items = re.findall(r"^    (\w[\w, ]*?)(?: \(|:)", section[1], re.M) if section else []
    return [argument for item in items for argument in item.split(", ")]


@pytest.mark.parametrize("name", sorted(hf_refspec.__all__))
def test_a_docstring_lists_only_arguments_that_there_are(name):
    value = getattr(hf_refspec, name)
    if callable(value) and documented(name):
        assert set(documented(name)) <= set(inspect.signature(value).parameters)
