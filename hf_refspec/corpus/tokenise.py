"""Documents tokenised in threads, by a tokenizer that may be damaged, or cut into windows."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from ..messages import check_ids
from ..threads import map_in_order
from .untrusted import DatastoreError, one_line

Document: TypeAlias = str | np.ndarray  # a text, or ids of shape (n,)

# The tokenizer needs about 130 bytes for each character of a piece.
LONGEST_PIECE = 1 << 20
# The characters and the pieces that a thread tokenises at a time.
_CHARACTERS, _PIECES = 1 << 18, 1 << 12


_Piece: TypeAlias = tuple[Document, bool]  # and whether it is the last one of its document


def tokenised(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    dtype: np.dtype,
    threads: int,
) -> Generator[np.ndarray, None, None]:
    """Yields the ids (n,) of each document, in order and without special tokens.

    The pieces of a long text are tokenised in parallel. Where two of them meet, tokens can differ
    from the whole text's."""
    content = tokenizer.backend_tokenizer.to_str()
    of_thread = threading.local()  # a tokenizer locks its cache of words: each thread has its own
    encode = partial(_encode, content=content, dtype=dtype, of_thread=of_thread)
    parts: list[np.ndarray] = []
    with closing(map_in_order(encode, _batches(_pieces_of(documents)), threads)) as batches:
        for ids, is_last in chain.from_iterable(batches):
            parts.append(ids)
            if is_last:
                yield np.concatenate(parts) if len(parts) > 1 else ids
                parts = []


def _pieces_of(documents: Iterable[Document]) -> Iterator[_Piece]:
    """Cuts texts that are too long to be tokenised at once, at the ends of lines if possible."""
    for document in documents:
        start = 0
        while isinstance(document, str) and len(document) - start > LONGEST_PIECE:
            longest = start + LONGEST_PIECE
            end = document.rfind("\n", start, longest) + 1 or longest
            yield document[start:end], False
            start = end
        yield document[start:], True


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Groups pieces into batches of about the same work."""
    batch: list[_Piece] = []
    size = 0
    for content, is_last in pieces:
        if batch and (len(batch) == _PIECES or size + len(content) > _CHARACTERS):
            yield batch
            batch = []
            size = 0
        batch.append((content, is_last))
        size += len(content)
    yield batch


def _encode(
    batch: list[_Piece], content: str, dtype: np.dtype, of_thread: threading.local
) -> list[tuple[np.ndarray, bool]]:
    if not hasattr(of_thread, "tokenizer"):
        of_thread.tokenizer = load_backend(content)
    tokenizer: Tokenizer = of_thread.tokenizer
    encoded = []
    for piece, is_last in batch:
        ids: Any = piece
        if isinstance(piece, str):
            with naming_failures(f"the tokenizer fails on a text, {piece[:60]!r}"):
                (encoding,) = tokenizer.encode_batch_fast([piece], add_special_tokens=False)
                ids = encoding.ids
        encoded.append((np.array(ids, dtype), is_last))
    return encoded


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


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The smallest number above all of a tokenizer's ids."""
    return max(tokenizer.get_vocab().values()) + 1


def load_backend(content: str) -> Tokenizer:
    """Loads a tokenizer.json; the tokenizer neither truncates nor pads."""
    backend = Tokenizer.from_str(content)
    backend.no_truncation()
    backend.no_padding()
    return backend


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
        remedy = "the tokenizer has tokens that the model does not: remove their text"
        check_ids(f"document {number}", ids.max(initial=0), vocab_size, remedy)
        known = 1
        for begin in range(0, max(len(ids) - overlap, 1), length - overlap):
            window = ids[begin : begin + length]
            if len(window) > known:
                yield Window(window, known)
            known = overlap
