"""The page as a Space on the Hugging Face Hub."""

from __future__ import annotations

import sys
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from huggingface_hub import SpaceCardData
from packaging.requirements import Requirement

from ...smollm2 import HUB_ID
from ...store.card import TAGS
from ...store.hub import push_files
from .package import FROM_INDEX, Package

_README = """\
---
{metadata}
---

# hf_refspec

A chat in which plain and drafted decoding race side by side: drafts are looked up in the text so
far, in the model's own earlier logits and, if you choose so, in a datastore, and `{model}` verifies
them. In float32 the texts are the same. Written by `hf-refspec space --push`.
"""
_APP = '''\
"""A chat in which plain and drafted decoding race side by side."""
{install}
from hf_refspec.apps.space.app import serve

serve({arguments})
'''
_INSTALL = """
import subprocess
import sys

# A Space installs its requirements before its own files are there, such as this wheel.
pip = [sys.executable, "-m", "pip", "install", "--no-deps"]
subprocess.run([*pip, "{wheel}"], check=True)
"""
_TORCH = """\
# torch for CPUs; on a GPU delete the next line.
--extra-index-url https://download.pytorch.org/whl/cpu
torch=={version}
"""


def files(
    repo_id: str,
    model: str | None = None,
    dtype: str | None = None,
    datastore: str | None = None,
    package: Package = FROM_INDEX,
) -> dict[str, bytes]:
    """The files of a Space by name; the options before `package` are those of
    `apps.space.app.serve`."""
    for option, name in (("--model", model), ("--datastore", datastore)):
        if name is not None and (Path(name).exists() or name.count("/") != 1):
            raise ValueError(
                f"{option} {name} is not on the Hub, and a Space cannot read this machine's "
                "folders; push it to the Hub first, and name it as organisation/name"
            )
    given = {"model": model, "dtype": dtype, "datastore": datastore}
    arguments = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
    more: dict[str, Any] = {} if datastore is None else {"datasets": [datastore]}
    card = SpaceCardData(
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
    )
    install = _INSTALL.format(wheel=package.name) if isinstance(package, Path) else ""
    texts = {
        "README.md": _README.format(metadata=card.to_yaml(), model=model or HUB_ID),
        "requirements.txt": _requirements(package),
        "app.py": _APP.format(install=install, arguments=arguments),
    }
    contents = {name: text.encode() for name, text in texts.items()}
    if isinstance(package, Path):
        contents[package.name] = package.read_bytes()
    return contents


def _requirements(package: Package) -> str:
    torch = version("torch").partition("+")[0]  # without its build, which is for a CPU or a GPU
    lines = [f"transformers=={version('transformers')}"]
    if isinstance(package, Path):
        (about,) = distributions(path=[str(package)])
        for each in map(Requirement, about.requires or ()):
            if each.marker is None or each.marker.evaluate({"extra": "space"}):
                lines.append(str(each).partition(";")[0])
    else:
        requirement = Requirement(str(package))
        requirement.extras.add("space")
        lines.append(str(requirement))
    return _TORCH.format(version=torch) + "\n".join(lines) + "\n"


def push(repo_id: str, contents: dict[str, bytes], private: bool = False) -> str:
    """Writes a Space in one commit, creates it if need be, and returns its address."""
    return push_files(repo_id, "space", contents, private or None).repo_url.url
