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


def repository(repo_id: str) -> dict[str, bytes]:
    """The repository's files by path; its card names `repo_id`."""
    package = files(__package__)
    card = Template((package / "card.md").read_text(encoding="utf-8"))
    data = ModelCardData(
        library_name="transformers",
        license="apache-2.0",
        pipeline_tag="text-generation",
        tags=["custom_generate", *TAGS],
    )
    texts = {
        "README.md": card.substitute(
            metadata=data.to_yaml(), title=repo_id.split("/")[-1], repo=json.dumps(repo_id)
        ),
        "custom_generate/generate.py": (package / "generate.py").read_text(encoding="utf-8"),
        "custom_generate/requirements.txt": f"hf_refspec>={__version__}\n",
    }
    return {path: text.encode() for path, text in texts.items()}


def save(repo_id: str, folder: Path) -> None:
    """Writes the repository into a new folder."""
    with new_folder(folder) as new:
        for path, content in repository(repo_id).items():
            (new / path).parent.mkdir(exist_ok=True)
            (new / path).write_bytes(content)
