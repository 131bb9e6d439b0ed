"""The logits processor of a grammar."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor

from .compiled import CompiledGrammar


class GrammarProcessor(LogitsProcessor):
    """Allows only tokens that the grammar does.

    The grammar begins after the first ids that it sees of a text, the prompt, and is over with an
    end-of-text token. It can be used for one call after another: where the ids do not go on by one
    token they are a new prompt.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._texts: list[_Text] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        ids = input_ids.numpy(force=True)
        if len(self._texts) != len(ids):
            self._texts = [_Text(self._grammar) for _ in ids]
        allowed = np.zeros((len(ids), 8 * -(-scores.shape[1] // 8)), np.bool_)
        for text, row, mask in zip(self._texts, ids, allowed, strict=True):
            known = text.mask_after(row)[: len(mask)]
            mask[: len(known)] = known
        mask = torch.from_numpy(allowed[:, : scores.shape[1]]).to(scores.device)
        return scores.masked_fill(~mask, -torch.inf)


class _Text:
    """Where one row is in the grammar."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._ids = np.empty(0, np.int64)
        self._matcher: Any = None
        self._ended = False

    def mask_after(self, ids: np.ndarray) -> np.ndarray:
        """Which tokens may follow, bool of shape `(n,)`."""
        if not self._goes_on(ids):
            self._matcher, self._ended = self._grammar.start(), False
        self._ids = ids
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(packed, bitorder="little").astype(np.bool_)

    def _goes_on(self, ids: np.ndarray) -> bool:
        """Reads the last token, if it is the only new one."""
        if len(ids) != len(self._ids) + 1 or not (ids[:-1] == self._ids).all():
            return False
        token = int(ids[-1])
        self._ended = self._ended or token == self._grammar.eos_id
        return self._ended or self._matcher.try_consume_tokens([token]) == 1

    def __deepcopy__(self, memo: dict[int, Any]) -> _Text:
        copied = _Text(self._grammar)
        copied._ids, copied._ended = self._ids, self._ended
        copied._matcher = None if self._matcher is None else self._matcher.deep_copy()
        return copied
