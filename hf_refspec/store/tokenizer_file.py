"""The tokenizer that a datastore carries with it, so that nobody has to name it again.

It is the `tokenizer.json` of the library tokenizers, which is data alone: no code is loaded with
it, and no Hub is asked for it. Chat templates and the names of special tokens are not in it.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .files import DatastoreError, FileEntry, check_file, replacing


def write_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> FileEntry:
    """Writes what the documents are tokenised with into a folder."""
    path = folder / "tokenizer.json"
    with replacing(path) as new:
        new.write_text(tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
    return FileEntry.of(path)


def read_tokenizer(folder: Path, entry: FileEntry, name: str) -> PreTrainedTokenizerBase:
    """Reads it again, with the name that it had.

    Raises:
        DatastoreError: If the file is not as it was written, or no tokenizer.
    """
    check_file(folder, entry)
    path = folder / entry.name
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no exceptions of its own
        raise DatastoreError(f"{path} is no tokenizer: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    return PreTrainedTokenizerFast(tokenizer_object=backend, name_or_path=name)
