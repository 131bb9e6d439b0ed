"""Turns documents into tokens: the functions for it, and the program that runs in other processes.

This file imports nothing of this package and, beside numpy, only what stands inside its functions:
the processes that tokenise run it as a program, and are small and quick to start because of that.
"""

from __future__ import annotations

import pickle
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Document = str | np.ndarray
# The length of each document with its separator (0 for an empty one), and all of them in a row.
TokenBatch = tuple[np.ndarray, np.ndarray]

# The tokenizer takes about 130 bytes for each character that it has at once.
_LONGEST_PIECE = 1 << 20


def load_tokenizer(content: str) -> Tokenizer:
    """Makes the tokenizer of a tokenizer.json that never truncates and never pads."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(
    tokenizer: Tokenizer, documents: list[Document], dtype: np.dtype, separator: int
) -> TokenBatch:
    """Tokenises a batch of documents, each without special tokens of its own.

    A text of more than a million characters is tokenised in pieces, for the tokenizer would need
    much memory and time for it: where two of them meet the tokens can be others.

    Args:
        tokenizer (`tokenizers.Tokenizer`): As [`load_tokenizer`] makes it.
        documents (`list[str | np.ndarray]`): Texts, or ids already.
        dtype (`np.dtype`): The type of the tokens.
        separator (`int`): Is set after each document that is not empty.

    Returns:
        `TokenBatch`: Their lengths, and all tokens.
    """
    lengths = np.zeros(len(documents), np.int64)
    tokens = []
    end = np.array([separator], dtype)
    for number, document in enumerate(documents):
        parts = []
        if isinstance(document, str):
            for piece in _pieces(document):
                (encoding,) = tokenizer.encode_batch_fast([piece], add_special_tokens=False)
                parts.append(np.array(encoding.ids, dtype))
        else:
            parts.append(document.astype(dtype))
        length = sum(map(len, parts))
        if length:
            lengths[number] = length + 1
            tokens += [*parts, end]
    return lengths, np.concatenate(tokens) if tokens else np.empty(0, dtype)


def _pieces(text: str) -> Iterator[str]:
    """Cuts a text that is too long to be tokenised at once, at the ends of lines if it has them."""
    start = 0
    while len(text) - start > _LONGEST_PIECE:
        end = text.rfind("\n", start, start + _LONGEST_PIECE) + 1 or start + _LONGEST_PIECE
        yield text[start:end]
        start = end
    yield text[start:]


def serve_encoder() -> None:
    """Tokenises what comes on the standard input, until that ends; run by [`LocalEngine`].

    First comes the content of tokenizer.json with the type of the tokens and the separator, then
    batch after batch. The answer to each is a `TokenBatch`, or an exception.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The one who gives the work decides.
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    content, dtype, separator = pickle.load(requests)
    tokenizer = load_tokenizer(content)
    while True:
        try:
            documents = pickle.load(requests)
        except EOFError:
            return
        try:
            answer: Any = encode(tokenizer, documents, dtype, separator)
        except Exception as error:
            answer = RuntimeError(f"the tokenizer failed: {error!r}")
        pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()


if __name__ == "__main__":
    del sys.path[0]  # The folder of this file, whose names are not top-level modules.
    serve_encoder()
