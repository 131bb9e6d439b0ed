"""The card of a knowledge base: what people read about it on the Hub."""

from __future__ import annotations

import json
from importlib.resources import files
from string import Template

from .card import card_metadata, readable_size, table_rows
from .knowledge_base_config import KnowledgeBaseConfig


def knowledge_base_card(config: KnowledgeBaseConfig, repo_id: str | None) -> str:
    """Writes the card of a knowledge base.

    Args:
        config (`KnowledgeBaseConfig`): The knowledge base's.
        repo_id (`str`, *optional*): Where it is to be found on the Hub.

    Returns:
        `str`: Markdown, with a block of metadata at the top.
    """
    licence = config.source.get("license")
    template = Template((files(__package__) / "knowledge_base.md").read_text(encoding="utf-8"))
    return template.substitute(
        metadata=card_metadata(licence),
        title=repo_id.split("/")[-1] if repo_id else "Knowledge base",
        repo=json.dumps(repo_id or "path/to/this/folder"),
        retriever="SparseRetriever(passages)"
        if config.embeddings_file is None
        else "DenseRetriever(passages, encoder)",
        facts=table_rows(_facts(config)),
        files=table_rows(_files(config)),
        licence_note="" if licence else " Which one it is has not been stated: find out first.",
    )


def _facts(config: KnowledgeBaseConfig) -> list[tuple[str, ...]]:
    source = config.source
    facts: list[tuple[str, ...]] = [
        ("Documents", str(source.get("corpus", "not stated"))),
        ("Licence of the documents", str(source.get("license") or "not stated")),
        ("Passages", f"{config.passages:,}, of at most {config.chunk_length:,} tokens"),
        ("Tokens", f"{config.tokens:,}"),
        ("Tokenizer", f"`{config.tokenizer}`, ids below {config.vocab_size:,}"),
        ("Tokenizer fingerprint", f"`{config.fingerprint}`"),
    ]
    if config.embeddings_file is None:
        facts.append(("Embeddings", "none: for BM25 only"))
    else:
        encoder = source.get("encoder") or "not stated"
        facts.append(("Embeddings", f"of {config.dimension} numbers, by the encoder {encoder}"))
    if "hf_refspec" in source:
        facts.append(("Built with", f"hf_refspec {source['hf_refspec']}"))
    return facts


def _files(config: KnowledgeBaseConfig) -> list[tuple[str, ...]]:
    holds = ("the passages' tokens, and where each begins", "an embedding for each passage")
    return [
        (f"`{file.name}`", readable_size(file.size), what)
        for file, what in zip(config.files(), holds, strict=False)
    ]
