"""A hook of mkdocs: files of the project that are pages of the documentation as they stand."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_INCLUDED = {
    "benchmarks/README.md": "benchmarks/README.md",
    "benchmarks/settings.png": "benchmarks/settings.png",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds them, by their place in the documentation."""
    project = Path(config.config_file_path).parent
    for place, name in _INCLUDED.items():
        files.append(File.generated(config, place, abs_src_path=str(project / name)))
    return files
