"""The card of a stored folder on the Hub: a template, which is filled from config.json."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import fields
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

from huggingface_hub import DatasetCardData
from tqdm import tqdm

from ..corpus.untrusted import printable

if TYPE_CHECKING:
    from .stored_folder import FolderConfig

TAGS = ["hf-refspec", "speculative-decoding"]
# Common licences that the Hub knows. It refuses a card with an unknown one: the card of any other
# says "other" and the name.
_HUB_LICENCE = re.compile(
    r"apache-2\.0|mit|isc|bsd(-[23]-clause)?|mpl-2\.0|unlicense|a?gpl-3\.0|gpl-2\.0|lgpl-(2\.1|3\.0)"
    r"|cc0-1\.0|cc-by(-sa)?-3\.0|cc-by(-nc)?(-sa|-nd)?-4\.0|odc-by|odbl|other"
)


def card(config: FolderConfig, repo_id: str) -> str:
    """The card of a stored folder in the repo `repo_id`: Markdown below a block of metadata."""
    source = getattr(config, "source", {})
    licence = source.get("license")
    metadata: dict[str, Any] = {"pretty_name": repo_id.split("/")[-1]}
    if licence:
        identifier = re.sub(r"[^a-z0-9.]+", "-", str(licence).lower()).strip("-")
        if _HUB_LICENCE.fullmatch(identifier):
            metadata["license"] = identifier
        else:
            metadata.update(license="other", license_name=identifier)
    metadata |= {"library_name": "hf_refspec", "task_categories": ["text-generation"]}
    if "/" in (model := getattr(config, "model", "")):
        metadata["base_model"] = model
    about = {field.name: getattr(config, field.name) for field in fields(config)}
    texts: dict[str, str] = defaultdict(lambda: "not stated")
    texts.update({name: cell(value) for name, value in (source | about).items() if value})
    description = texts.get("description")
    texts.update(
        config.card_texts(),
        description_row=f"\n| Description | {description} |" if description else "",
        # The Hub's viewer would show config.json as rows of data.
        metadata=DatasetCardData(**metadata, tags=TAGS, viewer=False).to_yaml(),
        title=repo_id.split("/")[-1],
        repo=json.dumps(repo_id),
        files="\n".join(
            f"| `{file.name}` | {readable_size(file.size)} |" for file in config.files()
        ),
        licence_note="" if licence else " Which one it is has not been stated: find out first.",
    )
    template = Template((files(__package__) / config.TEMPLATE).read_text(encoding="utf-8"))
    return template.substitute(texts)


def cell(value: Any) -> str:
    """A value as text that cannot break out of the cell of a table."""
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return printable(" ".join(text.split())).replace("|", "\\|")


def readable_size(size: float) -> str:
    """A number of bytes with its unit."""
    return tqdm.format_sizeof(size, "B")
