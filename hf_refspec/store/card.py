"""The card of a datastore: what people read about it on the Hub."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from string import Template
from typing import Any

from huggingface_hub import DatasetCardData

from .folder import FileEntry, StoreConfig

TAGS = ["hf-refspec", "speculative-decoding"]
# The Hub refuses a card with a licence that it does not know. These are the commonest that it
# does; of a corpus with another one the card says "other" and the name.
_HUB_LICENCE = re.compile(
    r"apache-2\.0|mit|isc|bsd(-[23]-clause)?|mpl-2\.0|unlicense|a?gpl-3\.0|gpl-2\.0|lgpl-(2\.1|3\.0)"
    r"|cc0-1\.0|cc-by(-sa)?-3\.0|cc-by(-nc)?(-sa|-nd)?-4\.0|odc-by|odbl|other"
)


def datastore_card(config: StoreConfig, repo_id: str | None) -> str:
    """Writes the card of a datastore.

    Args:
        config (`StoreConfig`): The datastore's.
        repo_id (`str`, *optional*): Where it is to be found on the Hub.

    Returns:
        `str`: Markdown, with a block of metadata at the top.
    """
    source = config.source
    licence = source.get("license")
    template = Template((files(__package__) / "datastore.md").read_text(encoding="utf-8"))
    return template.substitute(
        metadata=card_metadata(licence),
        title=repo_id.split("/")[-1] if repo_id else "Datastore",
        repo=json.dumps(repo_id or "path/to/this/folder"),
        compact_use=_compact_use(config),
        facts=table_rows(_facts(config)),
        files=table_rows(_files(config)),
        mat=_mat(source.get("mat")),
        licence_note="" if licence else " Which one it is has not been stated: find out first.",
    )


def card_metadata(licence: str | None) -> str:
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


def _facts(config: StoreConfig) -> list[tuple[str, ...]]:
    source = config.source
    documents = sum(shard.documents for shard in config.shards) or source.get("documents")
    facts: list[tuple[str, ...]] = [
        ("Corpus", str(source.get("corpus", "not stated"))),
        ("Licence of the corpus", str(source.get("license") or "not stated")),
    ]
    if documents is not None:
        kept = ", exact duplicates dropped" if source.get("deduplicated") else ""
        facts.append(("Documents", f"{documents:,}{kept}"))
    if config.shards:
        # Each document is followed by a separator, which is no token.
        tokens = sum(shard.tokens - shard.documents for shard in config.shards)
        facts.append(("Tokens", f"{tokens:,}"))
    elif config.ngrams:
        facts.append(("Tokens counted", f"{config.ngrams.corpus_tokens:,}"))
    facts.append(("Tokenizer", f"`{config.tokenizer}`, ids below {config.vocab_size:,}"))
    facts.append(("Tokenizer fingerprint", f"`{config.fingerprint}`"))
    if config.shards:
        size = sum(s.tokens_file.size + s.suffixes_file.size for s in config.shards)
        facts.append(("Full form", f"{readable_size(size)}: all tokens and their suffix array"))
    if config.ngrams:
        size, ngrams = config.ngrams.file.size, sum(config.ngrams.ngrams)
        facts.append(
            (
                "Compact form",
                f"{readable_size(size)}: {ngrams:,} n-grams of up to {len(config.ngrams.ngrams)} "
                f"tokens, with {config.ngrams.nodes:,} draft nodes",
            )
        )
    if "hf_refspec" in source:
        facts.append(("Built with", f"hf_refspec {source['hf_refspec']}"))
    return facts


def _files(config: StoreConfig) -> list[tuple[str, ...]]:
    def row(file: FileEntry, holds: str) -> tuple[str, ...]:
        return f"`{file.name}`", readable_size(file.size), holds

    rows = []
    for shard in config.shards:
        rows.append(row(shard.tokens_file, f"tokens of {shard.documents:,} documents"))
        rows.append(row(shard.suffixes_file, "their suffix array"))
    if config.ngrams:
        rows.append(row(config.ngrams.file, "the compact form: n-grams and their draft trees"))
    return rows


def _compact_use(config: StoreConfig) -> str:
    if not config.ngrams or not config.shards:
        return ""
    size = readable_size(config.ngrams.file.size)
    return f'With `form="compact"` only the compact form is downloaded, {size}.\n\n'


def _mat(figures: dict[str, float] | None) -> str:
    if not figures:
        return "MAT (mean accepted tokens, new tokens per forward pass) has not been measured."
    rows = table_rows([(label, f"{value:.2f}") for label, value in figures.items()])
    return (
        "MAT (mean accepted tokens) is the number of new tokens per forward pass; plain decoding "
        f"has 1.0.\n\n| drafts for | MAT |\n| --- | ---: |\n{rows}"
    )


def table_rows(cells: list[tuple[str, ...]]) -> str:
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
