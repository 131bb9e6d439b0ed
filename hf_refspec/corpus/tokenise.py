"""Documents tokenised in batches, by a tokenizer that may be damaged, or cut into windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from tokenizers import Tokenizer

from .untrusted import DatastoreError, one_line

Document: TypeAlias = str | np.ndarray  # a text, or ids of shape (n,)
# The length of each document with its separator (0 for an empty one), int64 of shape (documents,),
# and all tokens in a row.
TokenBatch: TypeAlias = tuple[np.ndarray, np.ndarray]

# The tokenizer needs about 130 bytes for each character of a piece.
LONGEST_PIECE = 1 << 20


def batches(
    documents: Iterable[Document], most_characters: int = 1 << 18, most_documents: int = 1 << 12
) -> Iterator[list[Document]]:
    """Groups documents into batches of about the same work."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        full = len(batch) == most_documents or size + len(document) > most_characters
        if batch and full:
            yield batch
            batch = []
            size = 0
        batch.append(document)
        size += len(document)
    if batch:
        yield batch


@contextmanager
def naming_failures(what: str) -> Iterator[None]:
    """Raises errors of the library tokenizers as a DatastoreError that begins with `what`.

    They are bare Exceptions, and Rust panics, which derive from BaseException. A damaged tokenizer
    can fail over some texts alone."""
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or type(error).__name__ == "PanicException":
            raise DatastoreError(f"{what}: {one_line(error):.200}") from None
        raise


def load_backend(content: str) -> Tokenizer:
    """Loads a tokenizer.json; the tokenizer neither truncates nor pads."""
    backend = Tokenizer.from_str(content)
    backend.no_truncation()
    backend.no_padding()
    return backend


def encode(
    tokenizer: Tokenizer, documents: list[Document], dtype: np.dtype, separator: int
) -> TokenBatch:
    """Tokenises documents without special tokens; puts `separator` after each that is not empty.

    Where two pieces of a very long text meet, tokens can differ from the whole text's."""
    lengths = np.zeros(len(documents), np.int64)
    tokens: list[np.ndarray] = []
    end = np.array([separator], dtype)
    for number, document in enumerate(documents):
        if isinstance(document, str):
            with naming_failures(f"the tokenizer fails on a text, {document[:60]!r}"):
                parts = [
                    np.array(encoding.ids, dtype)
                    for piece in pieces(document)
                    for encoding in tokenizer.encode_batch_fast([piece], add_special_tokens=False)
                ]
        else:
            parts = [document.astype(dtype)]
        length = sum(map(len, parts))
        if length:
            lengths[number] = length + 1
            tokens += [*parts, end]
    return lengths, np.concatenate(tokens) if tokens else np.empty(0, dtype)


def pieces(text: str, longest: int = LONGEST_PIECE) -> Iterator[str]:
    """Cuts a text that is too long to be tokenised at once, at the ends of lines if possible."""
    start = 0
    while len(text) - start > longest:
        end = text.rfind("\n", start, start + longest) + 1 or start + longest
        yield text[start:end]
        start = end
    yield text[start:]


@dataclass(frozen=True)
class Window:
    """A piece of a text."""

    ids: np.ndarray  # int64 of shape (n,)
    # Tokens that are only context, the text's first one among them; each of the others is predicted
    # from the tokens before it.
    known: int

    @property
    def predicted(self) -> slice:
        """The positions that predict a target."""
        return slice(self.known - 1, len(self.ids) - 1)

    @property
    def targets(self) -> np.ndarray:
        """The predicted tokens, int64 of shape `(n - known,)`."""
        return self.ids[self.known :]


def windows(texts: Iterable[np.ndarray], length: int, vocab_size: int) -> Iterator[Window]:
    """Cuts texts (n,) into windows that fit a model and overlap by a quarter.

    Each token is predicted once, in context. Refuses ids that the model lacks."""
    overlap = length // 4
    for number, ids in enumerate(texts):
        if len(ids) and ids.max() >= vocab_size:
            raise ValueError(
                f"document {number} has the id {ids.max()}, outside of the model's vocabulary of "
                f"{vocab_size}: the tokenizer has tokens that the model does not; remove their text"
            )
        known = 1
        for begin in range(0, max(len(ids) - overlap, 1), length - overlap):
            window = ids[begin : begin + length]
            if len(window) > known:
                yield Window(window, known)
            known = overlap
