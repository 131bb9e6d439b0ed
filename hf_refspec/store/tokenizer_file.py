"""The tokenizer that a datastore carries with it, so that nobody has to name it again.

It is the `tokenizer.json` of the library tokenizers, which is data alone: no code is loaded with
it, and no Hub is asked for it. Chat templates and the names of special tokens are not in it.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .files import DatastoreError, FileEntry, check_file, write_bytes
from .printable import one_line


def write_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> FileEntry:
    """Writes what the documents are tokenised with into a folder."""
    text: str = tokenizer.backend_tokenizer.to_str()
    return write_bytes(folder / "tokenizer.json", text.encode())


def read_tokenizer(
    folder: Path, entry: FileEntry, name: str, vocab_size: int
) -> PreTrainedTokenizerBase:
    """Reads it again, with the name that it had.

    Raises:
        DatastoreError: If the file is not as it was written, or no tokenizer.
    """
    check_file(folder, entry)
    path = folder / entry.name
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no exceptions of its own
        raise DatastoreError(f"{path} is no tokenizer: {one_line(error):.200}") from None
    # To copy it, the library goes through all numbers up to the largest id, used or not: more than
    # the file has bytes are no vocabulary.
    largest = max(backend.get_vocab().values(), default=0)
    if largest >= min(vocab_size, entry.size):
        raise DatastoreError(f"{path} is damaged: it has the id {largest}, of {vocab_size} tokens")
    backend.no_truncation()
    backend.no_padding()
    return PreTrainedTokenizerFast(tokenizer_object=backend, name_or_path=name)
