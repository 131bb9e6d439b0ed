"""The Hub repository for `generate(custom_generate="user/name")`: `generate.py`, its requirements,
and a card with the tag `custom_generate`, as transformers asks for them."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from string import Template

from huggingface_hub import ModelCardData

from ...store.card import TAGS
from ...store.folder import new_folder
from ...version import __version__
from .package import FROM_INDEX, Package


def repository(repo_id: str, package: Package = FROM_INDEX) -> dict[str, bytes]:
    """The repository's files by path; its card names `repo_id`, and how to install `package`."""
    here = files(__package__)
    card = Template((here / "card.md").read_text(encoding="utf-8"))
    if isinstance(package, Path):
        install = f"hf download {repo_id} {package.name} --local-dir .\npip install {package.name}"
        wheel = {package.name: package.read_bytes()}
    else:
        install, wheel = f'pip install "{package}"', {}
    data = ModelCardData(
        library_name="transformers",
        license="apache-2.0",
        pipeline_tag="text-generation",
        tags=["custom_generate", *TAGS],
    )
    texts = {
        "README.md": card.substitute(
            metadata=data.to_yaml(),
            title=repo_id.split("/")[-1],
            repo=json.dumps(repo_id),
            install=install,
        ),
        "custom_generate/generate.py": (here / "generate.py").read_text(encoding="utf-8"),
        # transformers compares it with what is installed, and reads names and versions only.
        "custom_generate/requirements.txt": f"hf_refspec>={__version__}\n",
    }
    return {path: text.encode() for path, text in texts.items()} | wheel


def save(contents: dict[str, bytes], folder: Path) -> None:
    """Writes the repository into a new folder."""
    with new_folder(folder) as new:
        for path, content in contents.items():
            (new / path).parent.mkdir(exist_ok=True)
            (new / path).write_bytes(content)
