"""The package's repositories on the Hub: for `custom_generate="user/name"`, and a Space."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import distributions, version
from importlib.resources import files
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from typing import TypeAlias
from urllib.parse import urlsplit
from urllib.request import url2pathname

from huggingface_hub import CardData, ModelCardData, SpaceCardData
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from ...smollm2 import HUB_ID
from ...store.hub import TAGS
from ...version import __version__

Package: TypeAlias = Requirement | Path
FROM_INDEX = Requirement(f"hf_refspec=={__version__}")
PACKAGE_HELP = (
    "how to install hf_refspec: a wheel, which is copied, or a requirement; by default a wheel of "
    "the checkout, or the wheel or the release that was installed"
)
_APP = '''\
"""A chat in which plain and drafted decoding race side by side."""
{install}
from hf_refspec.apps.space.page import serve

serve({arguments})
'''
_INSTALL = """
import subprocess
import sys
from pathlib import Path

# A Space installs its requirements before its own files are there, such as this wheel.
pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
subprocess.run([*pip, Path(__file__).with_name("{wheel}")], check=True)
"""
_TORCH = """\
# torch for CPUs; on a GPU delete the next line.
--extra-index-url https://download.pytorch.org/whl/cpu
torch=={version}
"""


@contextmanager
def package(text: str | None) -> Iterator[Package]:
    """The wheel or the requirement that a text names.

    Without one it is the wheel that was installed, one of the checkout that runs or was installed,
    which is deleted at the end, or the release of an index."""
    origin = _origin()
    if text is not None:
        yield _named(text)
    elif origin is None:
        yield FROM_INDEX
    elif origin.suffix == ".whl" and origin.is_file():
        yield origin
    elif (origin / "setup.cfg").is_file():
        with TemporaryDirectory() as folder:
            yield _wheel_of(origin, Path(folder))
    else:
        hint = "give --package WHEEL, which `python -m build` creates in a checkout"
        raise ValueError(f"{origin}, from which hf_refspec was installed, is gone; {hint}")


def _origin() -> Path | None:
    """The checkout that runs, or the wheel or the checkout that was installed, if any."""
    checkout = Path(__file__).parents[3]
    if (checkout / "setup.cfg").is_file():
        return checkout
    for found in distributions(name="hf_refspec"):
        if text := found.read_text("direct_url.json"):
            return Path(url2pathname(urlsplit(json.loads(text)["url"]).path))
    return None


def _named(text: str) -> Package:
    """Reads the path of a wheel of hf_refspec, or a requirement of it."""
    if Path(text).is_file():
        if [found.name for found in distributions(path=[text])] == ["hf_refspec"]:
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


def _wheel_of(checkout: Path, folder: Path) -> Path:
    """Builds a wheel in a folder, from a copy, as setuptools writes into the sources."""
    copy = folder / "copy"
    ignored = shutil.ignore_patterns("__pycache__", "*.py[cod]")
    shutil.copytree(checkout / "hf_refspec", copy / "hf_refspec", ignore=ignored)
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(checkout / name, copy)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"]
    built = subprocess.run([*pip, "--wheel-dir", folder, copy], capture_output=True, text=True)
    if built.returncode != 0:
        raise OSError(f"no wheel of {checkout} was built; give --package WHEEL: {built.stderr}")
    return next(folder.glob("*.whl"))


def generate_repository(repo_id: str, package: Package = FROM_INDEX) -> dict[str, bytes]:
    """The repository's files by path; its card names `repo_id`, and how to install `package`."""
    install = f'pip install "{package}"'
    if isinstance(package, Path):
        install = f"hf download {repo_id} {package.name} --local-dir .\npip install {package.name}"
    data = ModelCardData(
        library_name="transformers",
        license="apache-2.0",
        pipeline_tag="text-generation",
        tags=["custom_generate", *TAGS],
    )
    texts = {
        "README.md": _card("card.md", data, repo_id, install=install),
        "custom_generate/generate.py": _text("generate.py"),
        # transformers compares it with the installed packages, and reads only names and versions.
        "custom_generate/requirements.txt": f"hf_refspec>={__version__}\n",
    }
    return _contents(texts, package)


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
    options = {"model": model, "dtype": dtype, "datastore": datastore}
    arguments = ", ".join(f"{name}={value!r}" for name, value in options.items() if value)
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
        datasets=None if datastore is None else [datastore],
    )
    install = _INSTALL.format(wheel=package.name) if isinstance(package, Path) else ""
    named = {"model": model or HUB_ID, "store": datastore or "none"}
    texts = {
        "README.md": _card("space.md", card, repo_id, **named),
        "requirements.txt": _requirements(package),
        "app.py": _APP.format(install=install, arguments=arguments),
    }
    return _contents(texts, package)


def _contents(texts: dict[str, str], package: Package) -> dict[str, bytes]:
    contents = {path: text.encode() for path, text in texts.items()}
    if isinstance(package, Path):
        contents[package.name] = package.read_bytes()
    return contents


def _text(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _card(template: str, metadata: CardData, repo_id: str, **texts: str) -> str:
    texts |= {"title": repo_id.split("/")[-1], "repo": json.dumps(repo_id)}
    return Template(_text(template)).substitute(texts, metadata=metadata.to_yaml())


def _requirements(package: Package) -> str:
    torch = version("torch").partition("+")[0]  # without its build, which is for a CPU or a GPU
    lines = [f"transformers=={version('transformers')}"]
    if isinstance(package, Path):
        lines.append(f"# hf_refspec is {package.name}, which app.py installs; its requirements:")
        (about,) = distributions(path=[str(package)])
        for needed in map(Requirement, about.requires or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": "space"}):
                lines.append(str(needed).partition(";")[0])
    else:
        requirement = Requirement(str(package))
        requirement.extras.add("space")
        lines.append(str(requirement))
    return _TORCH.format(version=torch) + "\n".join(lines) + "\n"
