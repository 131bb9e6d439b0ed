"""Rows of one static cache, as many as it was made with, which texts take and leave.

    row 0   p p p x x x r d d d _ _ _ _        p  prompt, x  output   r  root, d  draft nodes
    row 1   _ _ _ _ _ _ _ _ _ _ _ _ _ _        _  free
    row 2   p p p p p x r d _ _ _ _ _ _

Each pass runs over all rows, so that nothing is compiled anew when a text joins. Where passes are
not compiled, that would only cost time: see `packed.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, StaticCache

from ..drafting.tree import DraftTree
from ..text_config import context_length, text_config
from .cache import USUAL_ARGUMENTS, LayerEntries
from .static import StaticVerifier
from .token_sequence import FixedTokens, TokenSequence
from .tree import TreeVerifier
from .verifier import Verifier

# The tokens of a text that a row has room for, where the model takes so many.
_ROW_TOKENS = 4096
# What stands in a free row: one token, which does not run.
_NOTHING = FixedTokens(torch.zeros((1, 1), dtype=torch.int64))

T = TypeVar("T")


class StaticRowsVerifier(StaticVerifier):
    """Draft trees of texts that another verifier has prefilled, each in a row of a static cache."""

    drops_rows = True
    fewest_rows = 2

    _taken: list[int]  # the row of the cache that each text has

    @classmethod
    def supports(cls, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
        """Needs the usual arguments, see also [`StaticVerifier`]."""
        return model_kwargs.keys() <= USUAL_ARGUMENTS and super().supports(model, model_kwargs)

    @classmethod
    def of(cls, first: TreeVerifier, rows: int) -> StaticRowsVerifier:
        """Goes on with the text that another verifier has prefilled, in a new cache."""
        model, tokens = first.model, context_length(first.model) or _ROW_TOKENS
        cache = StaticCache(config=text_config(model), max_cache_len=min(tokens, _ROW_TOKENS))
        kwargs = {**first.model_kwargs, "past_key_values": cache}
        kwargs.pop("attention_mask", None)
        verifier = cls(model, first.generation_config, kwargs)
        for layer, like in zip(cache.layers, first.cache.layers, strict=True):
            layer.lazy_initialization(
                like.keys.expand(rows, -1, -1, -1), like.values.expand(rows, -1, -1, -1)
            )
        verifier.cached = [1] * rows
        verifier._after_prefill({})
        verifier.entries.begin(0)
        verifier._taken = []
        verifier.join(first)
        return verifier

    def takes(self, other: Verifier) -> bool:
        """Whether another text has room in a row, and asks for passes that are compiled alike."""
        config = other.generation_config
        return (
            config.max_length + self.widths[-1] <= self.entries.length
            and config.compile_config == self.generation_config.compile_config
        )

    def join(self, other: TreeVerifier) -> None:
        """Adds such a text, in a free row."""
        row = min({*range(len(self.cached))} - {*self._taken})
        [length] = other.cached
        self.entries.move()  # also what a text has left that had this row
        for layer, theirs in zip(self.cache.layers, other.cache.layers, strict=True):
            layer.keys[row, :, :length] = theirs.keys[0]
            layer.values[row, :, :length] = theirs.values[0]
            theirs.keys = theirs.values = None
        [seen] = other._inputs.prompt_mask
        self._is_text[row] = True
        self._is_text[row, : len(seen)] = seen
        self._inputs.put(row, other._inputs)
        self._taken = [*self._taken, row]
        self._offsets = [*self._offsets, *other._offsets]
        self.cached = [length if i == row else n for i, n in enumerate(self.cached)]

    def select(self, rows: list[int]) -> None:
        self._taken = [self._taken[i] for i in rows]
        self._offsets = [self._offsets[i] for i in rows]
        self.cached = [n if i in self._taken else 1 for i, n in enumerate(self.cached)]

    def _after_prefill(self, outputs: Mapping[str, Any]) -> None:
        super()._after_prefill(outputs)
        self._taken = list(range(len(self.cached)))

    def forward(self, rows: Sequence[TokenSequence], drafts: Sequence[DraftTree]) -> torch.Tensor:
        if not self.cached:
            return super().forward(rows, drafts)
        empty = DraftTree.empty()
        logits = super().forward(self._by_row(rows, _NOTHING), self._by_row(drafts, empty))
        return logits[self._taken]

    def keep(self, paths: Sequence[list[int] | None]) -> None:
        super().keep(self._by_row(paths, None) if self._last is not None else paths)

    def cached_entries(self, index: int) -> LayerEntries:
        """Keys and values of a text in each layer, `(1, heads, n, head_dim)`."""
        self.entries.move()
        row = self._taken[index]
        kept = slice(row, row + 1), slice(None), slice(self.cached[row])
        return [(layer.keys[kept], layer.values[kept]) for layer in self.cache.layers]

    def _by_row(self, of_texts: Sequence[T], free: T) -> list[T]:
        of_rows = [free] * len(self.cached)
        for row, each in zip(self._taken, of_texts, strict=True):
            of_rows[row] = each
        return of_rows
