"""Turns texts into vectors and checks what the encoder returns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..store.names import is_here, is_only_cached


class TextEncoder:
    """An encoder of texts: a callable, or a model of the library sentence-transformers.

    A model that encodes passages and queries differently is called by its methods
    `encode_document` and `encode_query`.

    Args:
        encoder (`str`, `Path`, `SentenceTransformer` or callable): The folder or the Hub id of a
            sentence-transformers model, such a model, or a callable that takes a list of texts and
            returns an array of shape `(len(texts), d)`, a row for each. The similarity of two texts
            is the inner product of their rows.

    Attributes:
        name (`str`): A name for cards.
    """

    def __init__(self, encoder: Any) -> None:
        name = None
        if isinstance(encoder, str | os.PathLike):
            # Without its path, which means nothing to others.
            name = Path(encoder).resolve().name if os.path.isdir(encoder) else str(encoder)
            encoder = load_encoder(encoder)
        if hasattr(encoder, "encode"):
            self._encode_passages = getattr(encoder, "encode_document", encoder.encode)
            self._encode_queries = getattr(encoder, "encode_query", encoder.encode)
            self._options = {"show_progress_bar": False, "convert_to_numpy": True}
        elif callable(encoder):
            self._encode_passages = self._encode_queries = encoder
            self._options = {}
        else:
            raise TypeError(
                "encoder must be a SentenceTransformer, the folder or Hub id of one, or a callable "
                f"that returns an array of shape (n, d) for a list of n texts, but is {encoder!r}"
            )
        self.name = name or getattr(encoder, "__name__", type(encoder).__name__)

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        """The vectors of passages, float32 of shape `(len(texts), d)`."""
        return self._checked(self._encode_passages, list(texts))

    def query(self, text: str, dimension: int) -> np.ndarray:
        """The vector of a query, float32 of shape `(dimension,)`; raises as `passages`."""
        (vector,) = self._checked(self._encode_queries, [text])
        if len(vector) != dimension:
            raise ValueError(
                f"encoder returns vectors of dimension {len(vector)}, but the knowledge base has "
                f"vectors of {dimension}; use the encoder that it was built with"
            )
        return vector

    def _checked(self, encode: Any, texts: list[str]) -> np.ndarray:
        try:
            returned = encode(texts, **self._options)
        except Exception as error:
            raise RuntimeError(
                f"encoder failed on {len(texts)} texts, the first being {texts[0][:80]!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if type(returned).__module__.startswith("torch"):  # numpy knows no bfloat16
            returned = returned.float().numpy(force=True)
        try:
            vectors = np.ascontiguousarray(returned, dtype=np.float32)
        except (TypeError, ValueError):
            vectors = np.empty(0, np.float32)
        if vectors.ndim != 2 or len(vectors) != len(texts) or vectors.shape[1] == 0:
            raise ValueError(
                f"encoder must return an array of shape ({len(texts)}, d) for {len(texts)} texts, "
                f"but returned {type(returned).__name__} of shape {np.shape(returned)}"
            )
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            raise ValueError(
                f"encoder returned NaN or infinite numbers for {len(bad)} of {len(texts)} texts, "
                f"the first being {texts[bad[0]][:80]!r}"
            )
        return vectors


def load_encoder(name: str | os.PathLike) -> Any:
    """The sentence-transformers model in a folder, or of a Hub id."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise ImportError(
            f"the encoder {name} needs sentence-transformers: pip install sentence-transformers"
        ) from None
    name = os.fspath(name)
    cached = not is_here(name) and is_only_cached(name, "model", ["config.json", "modules.json"])
    try:
        return SentenceTransformer(name, local_files_only=cached)
    except (OSError, ValueError) as error:
        first_line = str(error).partition("\n")[0]
        raise ValueError(f"the encoder {name} cannot be loaded: {first_line}") from error
