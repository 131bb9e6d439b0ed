"""Which tokenizer the tokens of a stored folder are from."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from .files import DatastoreError
from .printable import printable

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")

if TYPE_CHECKING:  # which takes seconds to load, and datastores need no model
    from transformers import PreTrainedModel


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A checksum of what decides which id a piece of text gets: vocabulary, merges, added tokens.

    Names, chat templates, padding and the like do not count, nor does how the text is cut before
    it is merged: tokens that were cut in another way mean the same, and only draft a little worse.
    """
    check_fast(tokenizer)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    vocabulary, merges = sorted(tokenizer.get_vocab().items()), model.get("merges", [])
    text = json.dumps([vocabulary, merges], ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def check_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises a ValueError for a tokenizer that is not of the library tokenizers."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"tokenizer must be a fast one (AutoTokenizer loads it where there is one), "
            f"but is a {type(tokenizer).__name__}"
        )


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The smallest number above all of a tokenizer's ids."""
    return max(tokenizer.get_vocab().values()) + 1


def public_name(pretrained: PreTrainedTokenizerBase | PreTrainedModel) -> str:
    """The name of a tokenizer or a model, for people; never a local path."""
    name = str(getattr(pretrained, "name_or_path", None) or "")
    if name and (os.path.isdir(name) or _HUB_ID.fullmatch(name) is None):
        name = Path(name).resolve().name
    return name or type(pretrained).__name__


def check_tokenizer(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    remedy: str,
    fingerprint: str,
    name: str,
    ids: int | None = None,
) -> None:
    """Refuses a tokenizer that the folder at `path` was not made for; `fingerprint`, `name` and the
    number of `ids` (if it is known) are those of the tokenizer that it was made for."""
    found = tokenizer_fingerprint(tokenizer)
    if found != fingerprint:
        raise DatastoreError(
            f"{path} was made for another tokenizer: {printable(name):.100} with the fingerprint "
            f"{printable(fingerprint):.100}, not {tokenizer.name_or_path} with {found}; {remedy}"
        )
    # Memory is allocated for so many.
    if ids not in (None, vocabulary_size(tokenizer)):
        raise DatastoreError(
            f"{path} is damaged: its vocab_size is {ids}, but its tokenizer has "
            f"{vocabulary_size(tokenizer)} ids"
        )
