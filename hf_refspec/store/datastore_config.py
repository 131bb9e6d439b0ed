"""The config.json of a datastore and its files.

tokens-00001.safetensors        tokens    uint16 or uint32, a separator after each document
suffixes-00001.safetensors      suffixes  int32, the suffix array of those tokens
ngrams-0123456789ab.safetensors (compact form) n-grams and their draft trees
names-0123456789ab.json         which documents have names
tokenizer.json                  the tokenizer that the documents were tokenised with
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeAlias, get_args

import numpy as np

from ..messages import counted
from .files import DatastoreError, FileEntry
from .folder_config import FolderConfig, token_dtype
from .hub import cell, readable_size

Form: TypeAlias = Literal["full", "compact"]

TOKENS = re.compile(r"tokens-[0-9]{5,}\.safetensors")
SUFFIXES = re.compile(r"suffixes-[0-9]{5,}\.safetensors")
NGRAMS = re.compile(r"ngrams-[0-9a-f]{12}\.safetensors")
NAMES = re.compile(r"names-[0-9a-f]{12}\.json")
TOKENIZER = re.compile(r"tokenizer\.json")
OWN_FILES = (TOKENS, SUFFIXES, NGRAMS, NAMES)
# Each has two memory-mapped files, and Linux allows a process 65,530 of such maps.
MOST_SHARDS = 30_000
LONGEST_NGRAM = 8
# The entries of a measurement that the card shows.
COLUMNS = [
    "form",
    "prompts",
    "model",
    "draft tokens",
    "MAT without it",
    "MAT with it",
    "speed-up with it",
    "measured",
]
# A position in a shard must fit into an int32.
LARGEST_SHARD = 2**31 - 2


@dataclass(frozen=True)
class ShardEntry:
    """A part of the corpus: its tokens with separators, the documents that end in it, its files."""

    tokens: Annotated[int, range(1, LARGEST_SHARD + 1)]
    documents: Annotated[int, range(LARGEST_SHARD + 1)]
    tokens_file: Annotated[FileEntry, TOKENS]
    suffixes_file: Annotated[FileEntry, SUFFIXES]


@dataclass(frozen=True)
class NgramsEntry:
    """The compact form of `corpus_tokens` tokens: n-grams of the orders 1, 2, ..., and nodes."""

    ngrams: Annotated[list[Annotated[int, range(LARGEST_SHARD + 1)]], range(LONGEST_NGRAM + 1)]
    nodes: Annotated[int, range(LARGEST_SHARD + 1)]
    corpus_tokens: Annotated[int, range(2**62 + 1)]
    file: Annotated[FileEntry, NGRAMS]


@dataclass(frozen=True)
class StoreConfig(FolderConfig):
    """The config.json of a datastore: the full form (`shards`), the compact one (`ngrams`)."""

    NOUN = "datastore"
    REMEDY = "make a datastore with retokenize()"
    FILES = (*OWN_FILES, TOKENIZER)
    HAS_TOKENIZERS_IDS = True

    vocab_size: Annotated[int, range(1, 2**31)]
    source: dict[str, Any] = field(default_factory=dict)
    shards: Annotated[list[ShardEntry], range(MOST_SHARDS + 1)] = field(default_factory=list)
    ngrams: NgramsEntry | None = None
    tokenizer_file: Annotated[FileEntry, TOKENIZER] | None = None
    names_file: Annotated[FileEntry, NAMES] | None = None

    def check(self) -> None:
        if not self.shards and self.ngrams is None:
            raise ValueError("it names neither shards nor n-grams")
        if self.ngrams is not None and not self.ngrams.ngrams:
            raise ValueError("its n-grams have no length")

    @property
    def tokens(self) -> int:
        """Tokens of the full form's documents, without the separator after each."""
        return sum(shard.tokens - shard.documents for shard in self.shards)

    @property
    def documents(self) -> int:
        """Documents of the full form."""
        return sum(shard.documents for shard in self.shards)

    @property
    def token_dtype(self) -> np.dtype:
        """uint16 where it holds all tokens and the separator, else uint32."""
        return token_dtype(self.vocab_size)

    @property
    def separator(self) -> int:
        """The token after each document: the largest number of `token_dtype`."""
        return int(np.iinfo(self.token_dtype).max)

    def in_form(self, form: Form | None) -> StoreConfig:
        """The part of the datastore that a form needs; raises a DatastoreError without it."""
        if form is not None and form not in get_args(Form):
            raise ValueError(f"form must be one of {get_args(Form)}, but is {form!r}")
        if form == "full" and not self.shards:
            raise DatastoreError("it has only the compact form, not the full one")
        if form == "compact" and self.ngrams is None:
            raise DatastoreError("it has no compact form; make it with compact()")
        return replace(self, shards=[], names_file=None) if form == "compact" else self

    def state(self, form: Any) -> str | None:
        """Changes when documents are added or replaced, or when the compact form is replaced."""
        if form == "full":
            names = f", {self.names_file.name}" if self.names_file else ""
            return f"{self.tokens} tokens{names}"
        return self.ngrams.file.sha256 if self.ngrams else None

    @property
    def measured(self) -> list[dict[str, Any]]:
        """The measurements of `hf-refspec store evaluate` of each form as it is now."""
        stored = self.source.get("mat")
        found = stored if isinstance(stored, list) else []
        entries = [entry for entry in found if isinstance(entry, dict) and entry.get("state")]
        return [entry for entry in entries if entry["state"] == self.state(entry.get("form"))]

    def card_texts(self) -> dict[str, str]:
        shards = self.shards
        ngrams = self.ngrams
        documents = self.documents or self.source.get("documents")
        texts = {
            "documents": cell(documents or "not stated"),
            "full_form": "none",
            "compact_form": "none",
            "mat": "Not measured.",
        }
        if self.source.get("deduplicated"):
            texts["documents"] += ", exact duplicates dropped"
        if shards:
            size = readable_size(
                sum(shard.tokens_file.size + shard.suffixes_file.size for shard in shards)
            )
            parts = counted(len(shards), "shard")
            texts["full_form"] = (
                f"{size}: {self.tokens:,} tokens and their suffix array, in {parts}"
            )
        if ngrams:
            texts["compact_form"] = (
                f"{readable_size(ngrams.file.size)}: {sum(ngrams.ngrams):,} n-grams of up to "
                f"{len(ngrams.ngrams)} tokens, with {ngrams.nodes:,} draft nodes, from "
                f"{ngrams.corpus_tokens:,} tokens"
            )
        if self.measured:
            rows = [[entry.get(name, "") for name in COLUMNS] for entry in self.measured]
            rows = [COLUMNS, ["---"] * len(COLUMNS), *rows]
            texts["mat"] = "\n".join(f"| {' | '.join(map(cell, row))} |" for row in rows)
        return texts
