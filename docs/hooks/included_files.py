"""A hook of mkdocs: files of the project that are pages of the documentation as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_INCLUDED = {
    "benchmarks/README.md": "benchmarks/README.md",
    "benchmarks/gpus.md": "benchmarks/gpus.md",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
}
_PICTURES = "benchmarks/*.[ps][nv]g"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds them, by their place in the documentation."""
    project = Path(config.config_file_path).parent
    pictures = [path.relative_to(project).as_posix() for path in project.glob(_PICTURES)]
    for place, name in {**_INCLUDED, **dict(zip(pictures, pictures, strict=True))}.items():
        files.append(File.generated(config, place, abs_src_path=str(project / name)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turns links to them, which in the repository lead out of `docs`, into links to the pages."""
    folder = Path(page.file.src_uri).parent
    for place, name in _INCLUDED.items():
        link = relpath(Path("..", name), folder)
        markdown = re.sub(
            rf"\]\({re.escape(link)}(?=[)#])", f"]({relpath(place, folder)}", markdown
        )
    return markdown
