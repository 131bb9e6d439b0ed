"""What the config.json of a knowledge base says.

passages.safetensors    tokens      uint16 or uint32, of all passages in a row
                        bounds      int64, where each begins, and the end
embeddings.safetensors  embeddings  float32, a row for each passage (where there is an encoder)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np

from .card import cell
from .files import FileEntry
from .folder import FolderConfig, token_dtype
from .schema import Named, Range

PASSAGES = Named("a file of passages", r"passages\.safetensors")
EMBEDDINGS = Named("a file of embeddings", r"embeddings\.safetensors")
_LARGEST = 2**62


@dataclass(frozen=True)
class KnowledgeBaseConfig(FolderConfig):
    """What the config.json of a knowledge base says.

    Attributes:
        vocab_size (`int`): All token ids are below it.
        chunk_length (`int`): The most tokens of a passage.
        passages (`int`): How many.
        tokens (`int`): Of all passages together.
        dimension (`int`): Of the embeddings; 0 where there are none.
        passages_file (`FileEntry`): Where the tokens are.
        embeddings_file (`FileEntry`, *optional*): Where the embeddings are.
        source (`dict`): How it was built, for people and for the card.
    """

    NOUN = "knowledge base"
    HEADER: ClassVar[dict[str, Any]] = {"kind": NOUN, "format_version": 1}
    FILES = (PASSAGES, EMBEDDINGS)
    TEMPLATE = "knowledge_base.md"

    vocab_size: Annotated[int, Range(1, 2**31 - 1)]
    chunk_length: Annotated[int, Range(1, 2**31 - 1)]
    passages: Annotated[int, Range(1, _LARGEST)]
    tokens: Annotated[int, Range(1, _LARGEST)]
    dimension: Annotated[int, Range(0, 2**31 - 1)]
    passages_file: Annotated[FileEntry, PASSAGES]
    embeddings_file: Annotated[FileEntry, EMBEDDINGS] | None
    source: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        if (self.dimension == 0) != (self.embeddings_file is None):
            raise ValueError(f"dimension is {self.dimension}, which its embeddings_file belies")

    @property
    def token_dtype(self) -> np.dtype:
        """uint16 where it holds all tokens, else uint32."""
        return token_dtype(self.vocab_size, separator=False)

    def card_texts(self) -> dict[str, str]:
        if self.embeddings_file is None:
            return {"embeddings": "none: for BM25 only", "retriever": "SparseRetriever(passages)"}
        encoder = cell(self.source.get("encoder") or "not stated")
        return {
            "embeddings": f"of {self.dimension} numbers, by the encoder {encoder}",
            "retriever": "DenseRetriever(passages, encoder)",
        }
