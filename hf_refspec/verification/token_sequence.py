"""Rows of tokens, which a forward pass runs over."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch


class TokenSequence(Protocol):
    """The part of a row that a verifier needs."""

    @property
    def ids(self) -> torch.Tensor:
        """All tokens, including padding, int64 of shape `(1, length)`."""

    def tail(self, count: int) -> np.ndarray:
        """The last `count` tokens on the host, int64 of shape `(count,)`."""

    def __len__(self) -> int: ...


class FixedTokens:
    """Tokens `(1, length)` that do not grow."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def tail(self, count: int) -> np.ndarray:
        return self.ids[0, len(self) - count :].numpy(force=True).astype(np.int64)

    def __len__(self) -> int:
        return self.ids.shape[1]
