"""The tokenizer that a datastore carries with it, so that nobody has to name it again.

It is the `tokenizer.json` of the library tokenizers, which is data alone: no code is loaded with
it, and no Hub is asked for it. Chat templates and the names of special tokens are not in it.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .files import DatastoreError, FileEntry, read_entry, write_bytes
from .printable import one_line


class TokenizerError(ValueError):
    """A tokenizer that fails."""


def is_of_tokenizer(error: BaseException) -> bool:
    """Whether the library tokenizers has raised an error.

    It raises bare Exceptions, and panics of Rust, which are not even these. A tokenizer that
    somebody has damaged fails when it is loaded, or over some texts alone: one without a token for
    what it does not know, or with a regular expression that would search forever.
    """
    return type(error) is Exception or type(error).__name__ == "PanicException"


def load_backend(content: str) -> Tokenizer:
    """Loads the tokenizer of a tokenizer.json, which never truncates and never pads."""
    backend = Tokenizer.from_str(content)
    backend.no_truncation()
    backend.no_padding()
    return backend


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
    path, content = folder / entry.name, read_entry(folder, entry)
    try:
        return _tokenizer(path, content, name, vocab_size)
    except DatastoreError:
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_of_tokenizer(error)):
            raise
        raise DatastoreError(f"{path} is no tokenizer: {one_line(error):.200}") from None


def _tokenizer(path: Path, content: bytes, name: str, vocab_size: int) -> PreTrainedTokenizerBase:
    backend = load_backend(content.decode())
    # To copy it, the library goes through all numbers up to the largest id, used or not: more than
    # the file has bytes are no vocabulary.
    largest = max(backend.get_vocab().values(), default=0)
    if largest >= min(vocab_size, len(content)):
        raise DatastoreError(f"{path} is damaged: it has the id {largest}, of {vocab_size} tokens")
    # One that panics over any text is found now, and not by who uses it.
    with suppress(Exception):  # of one that does not know these words
        backend.decode(backend.encode("a text to read").ids)
    return PreTrainedTokenizerFast(tokenizer_object=backend, name_or_path=name)
