"""Prefixes that prompts have in common: their keys and values are computed once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from ..drafting.token_ids import common_length
from ..verification.caches import KeysAndValues
from ..verification.model_memo import memo_of_state

# A prefix is shared from this many tokens on: copying fewer is not worth looking for them.
_LEAST_SHARED = 16


@dataclass(frozen=True)
class CachedText:
    """The ids `(n,)` of a text as far as they are cached, their keys and values
    `(1, heads, n, head_dim)`, and the state of the model that computed them."""

    ids: np.ndarray
    entries: KeysAndValues
    state: tuple[Any, ...]


class Prefixes:
    """Texts that have ended and stay cached, the latest of up to `tokens` in all."""

    def __init__(self, tokens: int) -> None:
        self._max_tokens = tokens
        self._kept: deque[CachedText] = deque()

    def keep(self, text: CachedText) -> None:
        """Copies a text that leaves, unless it is so long that it would displace all others."""
        if not 0 < len(text.ids) <= self._max_tokens:
            return
        copied = [(keys.clone(), values.clone()) for keys, values in text.entries]
        self._kept.append(replace(text, entries=copied))
        while sum(len(text.ids) for text in self._kept) > self._max_tokens:
            self._kept.popleft()

    def longest(
        self, ids: np.ndarray, state: tuple[Any, ...], running: Sequence[CachedText]
    ) -> tuple[KeysAndValues, int]:
        """The keys and values `(1, heads, n, head_dim)` of each layer of the longest prefix that a
        prompt has in common with a kept or a `running` text, and its length n; the last token of
        the prompt is no part of it."""
        if self._max_tokens == 0:
            return [], 0
        texts = [text for text in chain(self._kept, running) if text.state == state]
        lengths = [common_length(ids[:-1], text.ids) for text in texts]
        longest = max(lengths, default=0)
        if longest < _LEAST_SHARED:
            return [], 0
        shared = texts[lengths.index(longest)].entries
        return [(keys[:, :, :longest], values[:, :, :longest]) for keys, values in shared], longest


def state_of(model: PreTrainedModel) -> tuple[Any, ...]:
    """The state of a model that keys and values depend on: its weights, and whatever else can
    change logits."""
    versions = [
        (parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version)
        for parameter in model.parameters()
    ]
    return memo_of_state(model).setdefault("identity", object()), tuple(versions)
