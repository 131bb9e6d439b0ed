"""How a repository on the Hub gets hf_refspec: by a requirement of pip, or as a wheel in it."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import TypeAlias

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from ...version import __version__

Package: TypeAlias = Requirement | Path
FROM_INDEX = Requirement(f"hf_refspec=={__version__}")
PACKAGE = (
    f"what installs hf_refspec: a wheel, which is copied, or a requirement; default: {FROM_INDEX}"
)


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
