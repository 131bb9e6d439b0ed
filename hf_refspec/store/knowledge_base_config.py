"""What the config.json of a knowledge base says.

config.json             all else is named in it, with sizes and checksums
passages.safetensors    tokens      uint16 or uint32, of all passages in a row
                        bounds      int64, where each begins, and the end
embeddings.safetensors  embeddings  float32, a row for each passage (where there is an encoder)
README.md               the card, on the Hub
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .folder import (
    FileEntry,
    check_nesting,
    expected_count,
    expected_entry,
    parse_file,
    read_config,
    write_config,
)

FORMAT_VERSION = 1
FILE_NAME = re.compile(r"(passages|embeddings)\.safetensors")
NOUN = "knowledge base"
_LARGEST = 2**62


@dataclass(frozen=True)
class KnowledgeBaseConfig:
    """What config.json says.

    Attributes:
        fingerprint (`str`): Of the tokenizer, see [`tokenizer_fingerprint`].
        tokenizer (`str`): Its name, for people.
        vocab_size (`int`): All token ids are below it.
        chunk_length (`int`): The most tokens of a passage.
        passages (`int`): How many.
        tokens (`int`): Of all passages together.
        dimension (`int`): Of the embeddings; 0 where there are none.
        passages_file (`FileEntry`): Where the tokens are.
        embeddings_file (`FileEntry`, *optional*): Where the embeddings are.
        source (`dict`): How it was built, for people and for the card.
    """

    fingerprint: str
    tokenizer: str
    vocab_size: int
    chunk_length: int
    passages: int
    tokens: int
    dimension: int
    passages_file: FileEntry
    embeddings_file: FileEntry | None
    source: dict[str, Any] = field(default_factory=dict)

    @property
    def token_dtype(self) -> np.dtype:
        """uint16 where it holds all tokens, else uint32."""
        return token_dtype(self.vocab_size)

    def files(self) -> list[FileEntry]:
        """All files that the knowledge base consists of, beside config.json."""
        return [file for file in (self.passages_file, self.embeddings_file) if file is not None]

    def write(self, folder: Path) -> None:
        """Replaces the folder's config.json in one go."""
        about = {"kind": NOUN, "format_version": FORMAT_VERSION}
        write_config(folder, about | asdict(self))

    @classmethod
    def read(cls, folder: Path) -> KnowledgeBaseConfig:
        """Reads a folder's config.json and checks all that it says by itself.

        Raises:
            DatastoreError: If there is none, or it is not one that this version can read.
        """
        return read_config(folder, NOUN, FORMAT_VERSION, _parse_config)


def _parse_config(content: dict[str, Any]) -> KnowledgeBaseConfig:
    if content.get("kind") != NOUN:
        raise ValueError("it is not a knowledge base's; a datastore is opened with Datastore")
    config = KnowledgeBaseConfig(
        fingerprint=expected_entry(content, "fingerprint", str),
        tokenizer=expected_entry(content, "tokenizer", str),
        vocab_size=expected_count(content, "vocab_size", 1, 2**31 - 1),
        chunk_length=expected_count(content, "chunk_length", 1, 2**31 - 1),
        passages=expected_count(content, "passages", 1, _LARGEST),
        tokens=expected_count(content, "tokens", 1, _LARGEST),
        dimension=expected_count(content, "dimension", 0, 2**31 - 1),
        passages_file=parse_file(content["passages_file"], "passages", FILE_NAME),
        embeddings_file=None
        if content["embeddings_file"] is None
        else parse_file(content["embeddings_file"], "embeddings", FILE_NAME),
        source=expected_entry(content, "source", dict),
    )
    if (config.dimension == 0) != (config.embeddings_file is None):
        raise ValueError(f"dimension is {config.dimension}, which its embeddings_file belies")
    check_nesting(config.source)
    return config


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 where it holds all tokens of a vocabulary, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
