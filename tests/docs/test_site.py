"""The documentation builds without a warning, and without the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import hf_refspec

ROOT = Path(__file__).parents[2]


def test_the_documentation_builds_without_a_warning(tmp_path):
    # mkdocs-material has a notice about mkdocs itself.
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "site" / "api" / "drafters" / "index.html").read_text(encoding="utf-8")
    assert 'id="hf_refspec.ReferenceCopy"' in reference
    assert "[`" not in reference  # every cross-reference of a docstring has become one
    pages = (tmp_path / "site").rglob("*.html")
    assert not any("fonts.googleapis" in page.read_text(encoding="utf-8") for page in pages)


def test_the_api_reference_has_every_public_name():
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md")]
    documented = set(re.findall(r"^::: hf_refspec\.(\w+)$", "\n".join(pages), re.M))
    assert documented == {"Blend", *hf_refspec.__all__} - {"__version__"}
