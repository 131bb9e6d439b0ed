"""Which tokenizer the tokens of a stored folder are from, and the copy of it in a datastore.

The copy is the `tokenizer.json` of the library tokenizers. It is data alone: loading it runs no
code and needs no Hub. It has no chat template and no names of special tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..corpus.tokenise import load_backend, naming_failures
from ..corpus.untrusted import one_line, printable
from .files import DatastoreError, FileEntry, blocks_of
from .names import HUB_ID

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")

if TYPE_CHECKING:  # which takes seconds to load, and datastores need no model
    from transformers import PreTrainedModel


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A checksum of what decides which id a piece of text gets: vocabulary, merges, added tokens.

    Names, chat templates, padding and the like do not count, nor does how the text is cut before
    it is merged: tokens that were cut in another way mean the same, and only draft a little worse.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"tokenizer must be a fast one (AutoTokenizer loads it where there is one), "
            f"but has the type {type(tokenizer).__name__}"
        )
    return _fingerprint(tokenizer.backend_tokenizer.to_str())


@lru_cache(maxsize=4)
def _fingerprint(content: str) -> str:
    vocabulary = sorted(load_backend(content).get_vocab().items())
    merges = json.loads(content)["model"].get("merges", [])
    text = json.dumps([vocabulary, merges], ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def public_name(pretrained: PreTrainedTokenizerBase | PreTrainedModel | str) -> str:
    """The name of a tokenizer or a model (or of its folder), for people; never a local path."""
    found = pretrained if isinstance(pretrained, str) else getattr(pretrained, "name_or_path", None)
    name = str(found or "")
    if name and (os.path.isdir(name) or _HUB_ID.fullmatch(name) is None):
        path = Path(name).resolve()
        name = path.name
        if path.match(f"hf_refspec/{HUB_ID.split('/')[1]}"):  # the default model, converted
            name = HUB_ID
        elif path.match("models--*/snapshots/*"):  # in the Hub's cache
            name = path.parents[1].name.removeprefix("models--").replace("--", "/")
    return name or type(pretrained).__name__


def check_tokenizer(
    path: Path, tokenizer: PreTrainedTokenizerBase, remedy: str, fingerprint: str, name: str
) -> None:
    """Refuses a tokenizer whose fingerprint is not the folder's, which is called `name`."""
    found = tokenizer_fingerprint(tokenizer)
    if found != fingerprint:
        raise DatastoreError(
            f"{path} was made for another tokenizer: {printable(name):.100} with the fingerprint "
            f"{printable(fingerprint):.100}, not {tokenizer.name_or_path} with {found}; {remedy}"
        )


def read_tokenizer(
    folder: Path, entry: FileEntry, name: str, vocab_size: int
) -> PreTrainedTokenizerBase:
    """Reads a tokenizer and restores its name; raises a DatastoreError if it is damaged."""
    path = folder / entry.name
    content = b"".join(blocks_of(folder, entry))
    try:
        with naming_failures("it fails"):
            backend = load_backend(content.decode())
            # Copying it takes time for every number up to the largest id, used or not. A vocabulary
            # has fewer ids than its file has bytes.
            largest = max(backend.get_vocab().values(), default=0)
            if largest >= min(vocab_size, len(content)):
                raise ValueError(f"it has the id {largest}, of {vocab_size} tokens")
            # A tokenizer that panics over every text is refused here, before it is used.
            with suppress(Exception):  # it may not know these words
                backend.decode(backend.encode("a text to read").ids)
            return PreTrainedTokenizerFast(tokenizer_object=backend, name_or_path=name)
    except Exception as error:
        raise DatastoreError(f"{path} is not a tokenizer: {one_line(error):.200}") from None
