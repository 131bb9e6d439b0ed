"""What a package index shows."""

import configparser
import re
import runpy
from pathlib import Path

from hf_refspec.version import NEWEST_TRANSFORMERS, OLDEST_TRANSFORMERS

ROOT = Path(__file__).parents[1]


def test_the_readme_links_to_files_of_the_repository_by_its_address():
    script = runpy.run_path(str(ROOT / "setup.py"))
    shown = script["with_absolute_links"]((ROOT / "README.md").read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)]*)\)", shown)
    assert links and all(link.startswith("https://") for link in links)
    files = [link.partition("/HEAD/")[2] for link in links if link.startswith(script["REPOSITORY"])]
    assert "docs/demo.svg" in files
    assert all((ROOT / file.partition("#")[0]).exists() for file in files)


def test_the_bounds_of_transformers_are_the_same_everywhere():
    oldest = "{}.{}".format(*OLDEST_TRANSFORMERS)
    newest = "{}.{}".format(*NEWEST_TRANSFORMERS)
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    major, minor = NEWEST_TRANSFORMERS
    required = config["options"]["install_requires"].split()
    assert f"transformers>={oldest},<{major}.{minor + 1}" in required
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"transformers=={newest}." in constraints and f"transformers=={oldest}." in constraints
    for page in ("README.md", "docs/installation.md", "docs/limits.md"):
        assert f"{oldest} to {newest}" in (ROOT / page).read_text(encoding="utf-8"), page
