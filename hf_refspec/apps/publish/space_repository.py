"""The page as a Space on the Hugging Face Hub."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import SpaceCardData

from ...smollm2 import HUB_ID
from ...store.card import TAGS
from ...store.hub_repo import push_files
from ...version import __version__

_README = """\
---
{metadata}
---

# hf_refspec

A chat in which plain and drafted decoding race side by side: drafts are looked up in the text so
far and in the model's own earlier logits, and `{model}` verifies them. In float32 the texts are the
same. Written by `hf-refspec space --push`.
"""
_APP = '''\
"""A chat in which plain and drafted decoding race side by side."""

from hf_refspec.apps.space.app import serve

serve({arguments})
'''


def files(
    repo_id: str, model: str | None = None, dtype: str | None = None, datastore: str | None = None
) -> dict[str, str]:
    """The files of a Space by name; the options are those of `apps.space.app.serve`."""
    for option, name in (("--model", model), ("--datastore", datastore)):
        if name is not None and (Path(name).exists() or name.count("/") != 1):
            raise ValueError(
                f"{option} {name} is not on the Hub, and a Space cannot read this machine's "
                "folders; push it to the Hub first, and name it as organisation/name"
            )
    given = {"model": model, "dtype": dtype, "datastore": datastore}
    arguments = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
    more: dict[str, Any] = {} if datastore is None else {"datasets": [datastore]}
    metadata = SpaceCardData(
        title=repo_id.split("/")[-1],
        emoji="🏁",
        colorFrom="blue",
        colorTo="yellow",
        sdk="gradio",
        sdk_version=version("gradio"),
        python_version=f"{sys.version_info.major}.{sys.version_info.minor}",
        app_file="app.py",
        models=[model or HUB_ID],
        tags=TAGS,
        license="apache-2.0",
        short_description="Plain and drafted decoding, side by side",
        **more,
    ).to_yaml()
    torch = version("torch").partition("+")[0]  # without its build, which is for a CPU or a GPU
    requirements = [
        f"hf_refspec[space]=={__version__}",
        f"torch=={torch}",
        f"transformers=={version('transformers')}",
    ]
    return {
        "README.md": _README.format(metadata=metadata, model=model or HUB_ID),
        "requirements.txt": "\n".join(requirements) + "\n",
        "app.py": _APP.format(arguments=arguments),
    }


def push(repo_id: str, texts: dict[str, str], private: bool = False) -> str:
    """Writes a Space in one commit, creates it if need be, and returns its address."""
    contents = {name: text.encode() for name, text in texts.items()}
    return push_files(repo_id, "space", contents, private or None).repo_url.url
