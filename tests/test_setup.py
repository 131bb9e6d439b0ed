"""What a package index shows."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_readme_links_to_files_of_the_repository_by_its_address():
    script = runpy.run_path(str(ROOT / "setup.py"))
    shown = script["with_absolute_links"]((ROOT / "README.md").read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)]*)\)", shown)
    assert links and all(link.startswith("https://") for link in links)
    files = [link.partition("/HEAD/")[2] for link in links if link.startswith(script["REPOSITORY"])]
    assert "docs/demo.svg" in files
    assert all((ROOT / file.partition("#")[0]).exists() for file in files)
