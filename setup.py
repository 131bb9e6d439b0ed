"""What setup.cfg cannot say: the project's address, and README.md as a package index shows it."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/hf-refspec/hf_refspec"
_LINK_TO_FILE = re.compile(r"(!?)(\[[^]]*\])\((?!https?://)")


def with_absolute_links(readme: str) -> str:
    """A README that can be read apart from the repository: links to its files have its address."""

    def absolute(link: re.Match[str]) -> str:
        return f"{link[1]}{link[2]}({REPOSITORY}/{'raw' if link[1] else 'blob'}/HEAD/"

    return _LINK_TO_FILE.sub(absolute, readme)


if __name__ == "__main__":
    setup(
        long_description=with_absolute_links(Path("README.md").read_text(encoding="utf-8")),
        project_urls={
            "Source": REPOSITORY,
            "Documentation": f"{REPOSITORY}/blob/HEAD/docs/index.md",
            "Changes": f"{REPOSITORY}/blob/HEAD/CHANGELOG.md",
            "Issues": f"{REPOSITORY}/issues",
        },
    )
