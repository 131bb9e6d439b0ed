"""Cuts documents into passages and embeds them, for a knowledge base."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..store.build.engine import encode
from ..store.build.source import Source, batches
from ..store.stored_folder import token_dtype
from ..store.stored_tokenizer import load_backend, vocabulary_size
from .text_encoder import TextEncoder

# Texts that are passed to the encoder at once: enough for it to sort them by length.
_TEXTS_AT_ONCE = 512


def cut_passages(
    source: Source, tokenizer: PreTrainedTokenizerBase, chunk_length: int, progress: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokenises documents and cuts them into passages: all tokens, the bounds of the passages, and
    the document of each."""
    dtype = token_dtype(vocabulary_size(tokenizer), separator=False)
    backend = load_backend(tokenizer.backend_tokenizer.to_str())
    tokens: list[np.ndarray] = []
    lengths: list[int] = []
    passages_of: list[int] = []  # each document
    with tqdm(
        desc="reading", unit=" documents", total=source.total, disable=not progress or None
    ) as bar:
        for batch in batches(source.documents):
            separated, in_a_row = encode(backend, batch, dtype, separator=0)
            # Removes the separator after each document that is not empty.
            ends = np.cumsum(separated[separated > 0])
            tokens.append(np.delete(in_a_row, ends - 1))
            for length in separated.tolist():
                parts = even_parts(length - 1, chunk_length) if length else []
                lengths += parts
                passages_of.append(len(parts))
            bar.update(len(batch))
    if not lengths:
        raise ValueError("documents has no token in it: there is nothing to retrieve")
    documents = np.repeat(np.arange(len(passages_of), dtype=np.int64), passages_of)
    return np.concatenate(tokens), np.cumsum([0, *lengths], dtype=np.int64), documents


def even_parts(length: int, most: int) -> list[int]:
    """Divides `length` into as few parts of at most `most` as possible, of about equal length."""
    count = -(-length // most)
    return [length // count + (part < length % count) for part in range(count)]


def decode(tokenizer: PreTrainedTokenizerBase, tokens: np.ndarray) -> str:
    text = tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False)
    return str(text)


def embedded(
    encoder: TextEncoder,
    tokenizer: PreTrainedTokenizerBase,
    tokens: np.ndarray,
    bounds: np.ndarray,
    progress: bool,
) -> Iterator[np.ndarray]:
    """Yields the embeddings of the passages, block by block."""
    count, dimension = len(bounds) - 1, None
    with tqdm(desc="embedding", unit=" passages", total=count, disable=not progress or None) as bar:
        for first in range(0, count, _TEXTS_AT_ONCE):
            edges = bounds[first : first + _TEXTS_AT_ONCE + 1].tolist()
            texts = [decode(tokenizer, tokens[begin:end]) for begin, end in pairwise(edges)]
            vectors = encoder.passages(texts)
            dimension = dimension or vectors.shape[1]
            if vectors.shape[1] != dimension:
                raise ValueError(
                    f"encoder returned vectors of dimension {dimension}, and then of "
                    f"{vectors.shape[1]}; all must have the same"
                )
            yield vectors
            bar.update(len(texts))
