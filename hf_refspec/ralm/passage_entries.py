"""Keys and values of passages, kept across steps, calls and threads.

A passage comes first in the model's input, so that its keys and values depend on nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from ..verification.model_memo import memo_of, state_of

# The size of all passages: a quarter of the weights' bytes, but no less than that of 43 passages of
# 256 tokens with a model of 135M parameters in float32; on a GPU at most a quarter of its free
# memory.
FRACTION = 0.25
LEAST_BYTES = 1 << 29


class PassageEntries:
    """The caches of passages that one state of a model has read, up to `max_bytes`; the least
    recently used ones are dropped first.

    Attributes:
        bytes (`int`): The size of all keys and values that are kept.
    """

    def __init__(self, model_state: tuple[Any, ...], max_bytes: int) -> None:
        self.bytes = 0
        self._model_state = model_state
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, tuple[Cache, int]] = OrderedDict()  # oldest first
        self._lock = Lock()

    @classmethod
    def for_model(cls, model: PreTrainedModel) -> PassageEntries:
        """What is kept at `model`; dropped when its weights or its hooks change."""
        memo = memo_of(model)
        state = state_of(model)
        entries = memo.get(cls)
        if entries is None or entries._model_state != state:
            weights = sum(parameter.nbytes for parameter in model.parameters())
            max_bytes = max(LEAST_BYTES, int(FRACTION * weights))
            if model.device.type == "cuda":
                free_bytes = torch.cuda.mem_get_info(model.device)[0]
                max_bytes = min(max_bytes, int(FRACTION * free_bytes))
            entries = memo[cls] = cls(state, max_bytes)
        return entries

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, tokens: bytes) -> Cache | None:
        """The cache of a passage with these tokens, if it is kept. Passes need a copy of it."""
        with self._lock:
            if tokens not in self._kept:
                return None
            self._kept.move_to_end(tokens)
            return self._kept[tokens][0]

    def add(self, tokens: bytes, cache: Cache) -> None:
        """Keeps the cache of a passage, unless it is larger than all may be together."""
        size = sum(
            value.untyped_storage().nbytes()
            for layer in cache.layers
            for value in vars(layer).values()
            if isinstance(value, torch.Tensor)
        )
        if size > self._max_bytes:
            return
        with self._lock:
            _, replaced = self._kept.pop(tokens, (None, 0))  # another thread has read it as well
            self._kept[tokens] = cache, size
            self.bytes += size - replaced
            while self.bytes > self._max_bytes:
                _, (_, dropped) = self._kept.popitem(last=False)
                self.bytes -= dropped
