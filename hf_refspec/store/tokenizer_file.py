"""The tokenizer that a datastore carries with it: the `tokenizer.json` of the library tokenizers.

It is data alone: loading it runs no code and needs no Hub. It has no chat template and no names of
special tokens.
"""

from __future__ import annotations

from contextlib import suppress
from io import BytesIO
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .files import DatastoreError, FileEntry, check_file, write_bytes
from .printable import one_line


class TokenizerError(ValueError):
    """The tokenizer failed."""


def is_of_tokenizer(error: BaseException) -> bool:
    """Whether the library tokenizers raised an error: it raises bare Exceptions, and Rust panics
    that derive from BaseException. A damaged tokenizer can fail over some texts alone."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def load_backend(content: str) -> Tokenizer:
    """Loads a tokenizer.json; the tokenizer neither truncates nor pads."""
    backend = Tokenizer.from_str(content)
    backend.no_truncation()
    backend.no_padding()
    return backend


def write_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> FileEntry:
    """Writes a tokenizer into a folder."""
    text: str = tokenizer.backend_tokenizer.to_str()
    return write_bytes(folder / "tokenizer.json", text.encode())


def read_tokenizer(
    folder: Path, entry: FileEntry, name: str, vocab_size: int
) -> PreTrainedTokenizerBase:
    """Reads a tokenizer and restores its name; raises a DatastoreError if the file is not as
    it was written, or holds no tokenizer."""
    path, copy = folder / entry.name, BytesIO()
    check_file(folder, entry, copy)
    content = copy.getvalue()
    try:
        backend = load_backend(content.decode())
        # Copying it takes time for all numbers up to the largest id, used or not: a vocabulary has
        # no more of them than the file has bytes.
        largest = max(backend.get_vocab().values(), default=0)
        if largest >= min(vocab_size, len(content)):
            raise DatastoreError(
                f"{path} is damaged: it has the id {largest}, of {vocab_size} tokens"
            )
        # A tokenizer that panics over every text is refused here, and not where it is used.
        with suppress(Exception):  # it may not know these words
            backend.decode(backend.encode("a text to read").ids)
        return PreTrainedTokenizerFast(tokenizer_object=backend, name_or_path=name)
    except BaseException as error:
        if isinstance(error, DatastoreError) or not (
            isinstance(error, Exception) or is_of_tokenizer(error)
        ):
            raise
        raise DatastoreError(f"{path} is no tokenizer: {one_line(error):.200}") from None
