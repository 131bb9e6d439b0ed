"""The earlier calls whose prompts are most similar to a prompt, by embedding."""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .memory import Memory

logger = logging.getLogger("hf_refspec")

Encode: TypeAlias = Callable[[np.ndarray], Any]

# Vectors of one FAISS index. A full one is never changed, so that to add a vector copies little,
# and to forget the oldest ones is to drop an index.
_BLOCK = 1024
# Tokens whose embeddings are in memory at a time.
_PART = 4096


def mean_embedding(model: PreTrainedModel) -> Encode:
    """An encoder of prompts: the mean of the model's own input embeddings, of length 1.

    It costs no forward pass.

    Args:
        model (`PreTrainedModel`): The target model.
    """
    embeddings = model.get_input_embeddings()

    def encode(ids: np.ndarray) -> np.ndarray:
        parts = torch.from_numpy(ids).to(embeddings.weight.device).split(_PART)
        with torch.no_grad():
            total = sum(embeddings(part).float().sum(0) for part in parts)
            return torch.nn.functional.normalize(total, dim=0).numpy(force=True)

    return encode


def as_encode(encoder: Any, tokenizer: PreTrainedTokenizerBase | None) -> Encode:
    """Makes one function of all that is taken for an encoder.

    Args:
        encoder (callable or `SentenceTransformer`): See [`RetrievalCache`].
        tokenizer (`PreTrainedTokenizerBase`, *optional*): To give text to a `SentenceTransformer`.

    Raises:
        TypeError: If it is neither.
        ValueError: If the tokenizer is missing.
    """
    if hasattr(encoder, "encode") and not isinstance(encoder, str):
        if tokenizer is None:
            raise ValueError("encoder takes text: give the target model's tokenizer= as well")
        return lambda ids: encoder.encode(tokenizer.decode(ids, skip_special_tokens=True))
    if not callable(encoder):
        raise TypeError(
            "encoder must be a callable from ids to a vector or a SentenceTransformer, "
            f"but is {encoder!r}"
        )
    return encoder


class SimilarCalls:
    """Finds calls by the inner product of their prompts' embeddings, for many threads at once.

    An encoder that fails is warned of once; what it fails for is not found here. A copy (or pickle)
    is empty.
    """

    def __init__(self) -> None:
        self._encode: Encode | None = None
        self._new_index: Callable[[int], Any]
        self._lock = threading.Lock()
        self._warned = False
        self._size: int | None = None
        # Each a FAISS index and the numbers of the calls in it; vectors are added to the last one.
        self._blocks: list[tuple[Any, list[int]]] = []
        self._background: threading.Thread | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return SimilarCalls, ()

    def use(self, encode: Encode, memory: Memory) -> None:
        """Takes an encoder, if there is none yet.

        What is remembered is encoded in the background, the newest call first.

        Args:
            encode (callable): From ids, int64 of shape `(n,)`, to a vector.
            memory (`Memory`): The calls.
        """
        with self._lock:
            if self._encode is not None:
                return
            try:
                import faiss  # part of the extra `retrieval`
            except ImportError:
                self._warn("similar calls need FAISS: pip install hf_refspec[retrieval]")
                return
            numbers = memory.numbers
            self._encode, self._new_index = encode, faiss.IndexFlatIP
        if numbers:
            self._background = threading.Thread(
                target=self._add_all, args=(memory, numbers), daemon=True
            )
            self._background.start()

    def wait(self) -> None:
        """Waits until all that was remembered is encoded."""
        if self._background is not None:
            self._background.join()

    def _add_all(self, memory: Memory, numbers: range) -> None:
        for number in reversed(numbers):
            call = memory.call(number)
            vector = None if call is None else self.vector(call[0].astype(np.int64))
            if vector is not None:
                self.add(number, vector)

    def vector(self, prompt: np.ndarray) -> np.ndarray | None:
        """The embedding of a prompt, float32 of shape `(1, size)`; `None` if the encoder fails.

        It is `None` without an encoder, too.
        """
        if self._encode is None:
            return None
        try:
            vector = self._encode(prompt)
            if isinstance(vector, torch.Tensor):
                vector = vector.float().numpy(force=True)
            vector = np.asarray(vector, dtype=np.float32)
            if vector.ndim != 1 or len(vector) != (self._size or len(vector)):
                expected = f"({self._size},)" if self._size else "one dimension"
                raise ValueError(f"it has the shape {vector.shape} instead of {expected}")
            if len(vector) == 0 or not np.isfinite(vector).all():
                raise ValueError("it is empty or has numbers that are not finite")
        except Exception as error:
            self._warn(f"encoder gave no vector for a prompt: {error!r}")
            return None
        self._size = len(vector)
        return vector[None]

    def add(self, number: int, vector: np.ndarray) -> None:
        """Adds a call's number and the vector of its prompt."""
        with self._lock:
            if not self._blocks or len(self._blocks[-1][1]) == _BLOCK:
                self._blocks.append((self._new_index(vector.shape[1]), []))
            index, numbers = self._blocks[-1]
            index.add(vector)
            numbers.append(number)

    def search(self, vector: np.ndarray, count: int) -> list[int]:
        """The numbers of the most similar calls, the most similar first."""
        with self._lock:
            full = [block for block in self._blocks if len(block[1]) == _BLOCK]
            found = (
                [] if len(full) == len(self._blocks) else [_best(self._blocks[-1], vector, count)]
            )
        found += [_best(block, vector, count) for block in full]
        best = heapq.nlargest(count, (each for some in found for each in some))
        return [number for _, number in best]

    def forget(self, oldest: int) -> None:
        """Forgets calls before the number `oldest`, as far as they fill an index."""
        with self._lock:
            self._blocks = [block for block in self._blocks if max(block[1]) >= oldest]

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("%s; drafts go on without similar calls", message)


def _best(block: tuple[Any, list[int]], vector: np.ndarray, count: int) -> Iterable[Any]:
    index, numbers = block
    scores, places = index.search(vector, min(count, len(numbers)))
    return [(score, numbers[place]) for score, place in zip(scores[0], places[0], strict=True)]
