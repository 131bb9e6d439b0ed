"""The card of a stored folder: what people read about it on the Hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from importlib.resources import files
from string import Template
from typing import Any

from huggingface_hub import DatasetCardData

from .folder import NOT_STATED, FolderConfig

TAGS = ["hf-refspec", "speculative-decoding"]
# The Hub refuses a card with a licence that it does not know. These are the commonest that it
# does; of a corpus with another one the card says "other" and the name.
_HUB_LICENCE = re.compile(
    r"apache-2\.0|mit|isc|bsd(-[23]-clause)?|mpl-2\.0|unlicense|a?gpl-3\.0|gpl-2\.0|lgpl-(2\.1|3\.0)"
    r"|cc0-1\.0|cc-by(-sa)?-3\.0|cc-by(-nc)?(-sa|-nd)?-4\.0|odc-by|odbl|other"
)


def card(config: FolderConfig, repo_id: str) -> str:
    """Writes the card of a stored folder.

    Args:
        config (`FolderConfig`): What the folder's config.json says.
        repo_id (`str`): Where it will be found on the Hub.

    Returns:
        `str`: Markdown, with a block of metadata at the top.
    """
    licence = config.stated("license")
    facts = [
        *config.facts(),
        ("Tokenizer fingerprint", f"`{config.fingerprint}`"),
        ("Built with", f"hf_refspec {config.stated('hf_refspec')}"),
    ]
    sizes = [
        (f"`{file.name}`", readable_size(file.size), holds) for file, holds in config.contents()
    ]
    unknown = " Which one it is has not been stated: find out first."
    template = Template((files(__package__) / config.TEMPLATE).read_text(encoding="utf-8"))
    return template.substitute(
        metadata=_metadata(None if licence == NOT_STATED else licence),
        title=repo_id.split("/")[-1],
        repo=json.dumps(repo_id),
        facts=table_rows(facts),
        files=table_rows(sizes),
        licence_note=unknown if licence == NOT_STATED else "",
        **config.card_texts(),
    )


def _metadata(licence: str | None) -> str:
    """The block of metadata at the top of a card."""
    metadata: dict[str, Any] = {}
    if licence:
        identifier = re.sub(r"[^a-z0-9.]+", "-", licence.lower()).strip("-")
        if _HUB_LICENCE.fullmatch(identifier):
            metadata["license"] = identifier
        else:
            metadata.update(license="other", license_name=identifier)
    # The Hub's viewer would take config.json for rows of data.
    return DatasetCardData(**metadata, tags=TAGS, viewer=False).to_yaml()


def table_rows(cells: Iterable[tuple[str, ...]]) -> str:
    """Lines of a table; no cell can break out of its own."""
    return "\n".join(
        "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |"
        for row in cells
    )


def readable_size(size: float) -> str:
    """A number of bytes, for people."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
