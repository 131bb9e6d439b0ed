"""The logits processor of a grammar."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import LogitsProcessor

from .compiled import CompiledGrammar

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarProcessor(LogitsProcessor):
    """Allows only the tokens that a grammar allows.

    The grammar begins after the ids that it sees first, the prompt, and an end-of-text token ends
    it. It may serve one call after another, each with any number of rows: ids that go on with no
    text which it knows, by one token or from an earlier point of its output, are a prompt.

    Args:
        grammar ([`CompiledGrammar`]): What constrains each row.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._texts: list[_Text] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Sets the scores `(R, vocab_size)` of what cannot follow each row to minus infinity."""
        rows = input_ids.numpy(force=True).copy()
        self._texts = self._known(rows)
        allowed = np.zeros(scores.shape, np.bool_)
        for text, ids, row in zip(self._texts, rows, allowed, strict=True):
            mask = text.allowed_after(ids)[: len(row)]
            row[: len(mask)] = mask
        # Twice as fast as `masked_fill` on a CPU.
        return torch.where(torch.from_numpy(allowed).to(scores.device), scores, -torch.inf)

    def _known(self, rows: np.ndarray) -> list[_Text]:
        """The text that each row goes on with; in beam search it is another row's, or several go on
        with the same one."""
        texts: list[_Text] = []
        for i, ids in enumerate(rows):
            candidates = (*self._texts[i : i + 1], *self._texts)
            text = next((each for each in candidates if each.precedes(ids)), None)
            if text is None:
                text = _Text(self._grammar)
            texts.append(copy.deepcopy(text) if text in texts else text)
        return texts


class _Text:
    """Where a row is in the grammar."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._ids: np.ndarray | None = None
        self._prompt_length = 0
        self._matcher = grammar.start()

    def precedes(self, ids: np.ndarray) -> bool:
        """Whether ids go on with it by one token, or from an earlier point behind the prompt."""
        if self._ids is None or not self._prompt_length < len(ids) <= len(self._ids) + 1:
            return False
        return bool((self._ids[: len(ids) - 1] == ids[:-1]).all())

    def allowed_after(self, ids: np.ndarray) -> np.ndarray:
        """Which tokens may follow these ids, bool of shape `(n,)`."""
        if self._ids is None:
            self._prompt_length = len(ids)
        elif len(ids) == len(self._ids) + 1:
            self._matcher.try_consume_tokens([int(ids[-1])])
        else:
            self._matcher = self._grammar.start()
            self._matcher.try_consume_tokens(ids[self._prompt_length :].tolist())
        self._ids = ids
        return unpacked_mask(self._matcher)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Text:
        copied = copy.copy(self)
        copied._matcher = self._matcher.deep_copy()
        return copied


def unpacked_mask(matcher: LLMatcher) -> np.ndarray:
    """Which tokens may follow a state, bool of shape `(n,)`."""
    packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(packed, bitorder="little").view(np.bool_)
