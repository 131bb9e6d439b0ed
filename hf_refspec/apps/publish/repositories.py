"""The package's repositories on the Hub: for `custom_generate="user/name"`, and a Space."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from importlib.metadata import distributions, version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, TypeAlias

from huggingface_hub import ModelCardData, SpaceCardData
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from ...smollm2 import HUB_ID
from ...store.card import TAGS
from ...version import __version__

Package: TypeAlias = Requirement | Path
FROM_INDEX = Requirement(f"hf_refspec=={__version__}")
PACKAGE = (
    f"what installs hf_refspec: a wheel, which is copied, or a requirement; default: {FROM_INDEX}"
)
_README = """\
---
{metadata}
---

# hf_refspec

A chat in which plain and drafted decoding race side by side: drafts are looked up in the text so
far, in the model's own earlier logits and, if you like, in a datastore, and `{model}` verifies
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


def package(text: str | None) -> Package:
    """Reads the path of a wheel of hf_refspec, or a requirement of it."""
    if text is None:
        return FROM_INDEX
    if Path(text).is_file():
        if [each.name for each in distributions(path=[text])] == ["hf_refspec"]:
            return Path(text)
    else:
        with suppress(InvalidRequirement):
            requirement = Requirement(text)
            if canonicalize_name(requirement.name) == "hf-refspec":
                return requirement
    raise ValueError(
        f"--package {text} is neither a wheel of hf_refspec nor a requirement of it; give the path "
        'of a wheel, or a requirement such as "hf_refspec @ git+https://host/repository"'
    )


def generate_repository(repo_id: str, package: Package = FROM_INDEX) -> dict[str, bytes]:
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
        # transformers compares it with the installed packages, and reads only names and versions.
        "custom_generate/requirements.txt": f"hf_refspec>={__version__}\n",
    }
    return {path: text.encode() for path, text in texts.items()} | wheel


def space_repository(
    repo_id: str,
    model: str | None = None,
    dtype: str | None = None,
    datastore: str | None = None,
    package: Package = FROM_INDEX,
) -> dict[str, bytes]:
    """The files, by name, of a Space that serves the page with these options."""
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
