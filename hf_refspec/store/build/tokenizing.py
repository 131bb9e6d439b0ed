"""Turns documents into tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from tokenizers import Tokenizer

from ..printable import one_line
from ..stored_tokenizer import TokenizerError, is_of_tokenizer

Document = str | np.ndarray
# The length of each document with its separator (0 for an empty one), and all tokens in a row.
TokenBatch = tuple[np.ndarray, np.ndarray]

# The tokenizer needs about 130 bytes for each character of a piece.
LONGEST_PIECE = 1 << 20


def encode(
    tokenizer: Tokenizer, documents: list[Document], dtype: np.dtype, separator: int
) -> TokenBatch:
    """Tokenises a batch of documents without special tokens, and puts `separator` after each that
    is not empty. Raises a TokenizerError if the tokenizer fails.

    A text of more than a million characters is tokenised in pieces, to save memory and time; the
    tokens where two pieces meet can differ.
    """
    lengths = np.zeros(len(documents), np.int64)
    tokens: list[np.ndarray] = []
    end = np.array([separator], dtype)
    for number, document in enumerate(documents):
        if isinstance(document, str):
            encoded = (
                tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0]
                for piece in pieces(document)
            )
            try:
                parts = [np.array(each.ids, dtype) for each in encoded]
            except BaseException as error:
                if not is_of_tokenizer(error):
                    raise
                raise TokenizerError(
                    f"the tokenizer fails on a text, {document[:60]!r}: {one_line(error):.200}"
                ) from None
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
