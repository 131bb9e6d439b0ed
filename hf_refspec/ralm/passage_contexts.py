"""The model's input: a passage, the prompt and the output, with a cache for each passage.

The last few passages keep their caches, so that a passage that comes back costs no prefill. One
that was read before costs the prompt and the output alone, see `passage_entries.py`. The model
computes the same with speculation and without: a passage is always a pass of its own, the rest
follows in passes that depend only on the earlier passages, and undoing a step restores every cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import Cache, GenerationConfig, PreTrainedModel

from ..generation.row import Row
from ..text_config import length_dependent_rope, text_config
from ..transformers_names import cache_name, prefill
from ..verification.caches import find_cache, fresh_kwargs
from ..verification.choice import select_verifier
from ..verification.passes import FixedTokens
from ..verification.verifier import CHAIN, PLAIN, TREE, Kind, Verifier
from .passage_entries import PassageEntries

# Passages whose caches are kept: more of them save prefills, and take memory.
_PASSAGES = 8


@dataclass(eq=False)
class Context:
    """A passage, the prompt and the row's output: the model's input in place of the row, see
    [`Row.seen`]."""

    prefix: torch.Tensor  # passage and prompt, (1, p)
    _row: Row
    verifier: Verifier = field(init=False)

    @property
    def ids(self) -> torch.Tensor:
        prompt_length = len(self._row) - len(self._row.output)
        return torch.cat([self.prefix, self._row.ids[:, prompt_length:]], dim=-1)

    def tail(self, count: int) -> np.ndarray:
        if count <= len(self._row.output):
            return self._row.tail(count)
        return FixedTokens(self.ids).tail(count)

    def __len__(self) -> int:
        return self.prefix.shape[1] + len(self._row.output)


@dataclass(frozen=True, slots=True)
class ContextChange:
    """The changes of a step: the contexts kept before it, and how to undo the one it entered if
    that was among them."""

    kept: OrderedDict[bytes, Context]
    go_back: Callable[[], None] | None


@dataclass
class PassageContexts:
    """The contexts of the last few passages of a row's text; all have a verifier of one `kind`."""

    _model: PreTrainedModel
    _generation_config: GenerationConfig
    _model_kwargs: dict[str, Any]
    _row: Row
    _begin: np.ndarray  # before the passage, int64: a BOS token or nothing
    _prompt: np.ndarray  # behind it, int64: the rest of the prompt

    def __post_init__(self) -> None:
        self.kind: Kind = PLAIN
        config = text_config(self._model)
        if find_cache(self._model_kwargs) is not None and not length_dependent_rope(config):
            choice = select_verifier(
                self._model, "auto", 1, self._generation_config, self._model_kwargs
            )
            if choice.verifier is not None:
                self.kind = choice.verifier.kind
        self._entries = PassageEntries.for_model(self._model)
        self._kept: OrderedDict[bytes, Context] = OrderedDict()

    def enter(self, passage: np.ndarray) -> tuple[Context, ContextChange]:
        """Returns the context of a passage (int64 ids) for the next step, and what `undo` needs."""
        key = passage.tobytes()
        kept = self._kept.copy()
        context = self._kept.pop(key, None)
        go_back = None if context is None else context.verifier.mark()
        self._kept[key] = context or self._new(passage)
        if len(self._kept) > _PASSAGES:
            self._kept.popitem(last=False)
        return self._kept[key], ContextChange(kept, go_back)

    def undo(self, change: ContextChange) -> None:
        """Undoes the last step."""
        self._kept = change.kept.copy()
        if change.go_back is not None:
            change.go_back()

    def _new(self, passage: np.ndarray) -> Context:
        prefix = torch.from_numpy(np.concatenate([self._begin, passage, self._prompt]))[None]
        prefix = prefix.to(self._row.ids.device)
        context = Context(prefix, self._row)
        kwargs = self._model_kwargs
        if find_cache(kwargs) is not None:
            mask = torch.ones_like(context.ids)
            kwargs = fresh_kwargs(self._model, kwargs, mask)
            # The prefill needs a token behind the passage.
            length = min(len(self._begin) + len(passage), len(context) - 1)
            if length and self.kind in (TREE, CHAIN):
                kwargs[cache_name(kwargs)] = self._read(prefix[:, :length])
                # Its length shows that the ids include the cached ones.
                kwargs["attention_mask"] = mask
        context.verifier = Verifier(self.kind, self._model, self._generation_config, kwargs)
        return context

    def _read(self, ids: torch.Tensor) -> Cache:
        """A cache that holds these ids `(1, n)` of a passage, which run unless they are kept."""
        key = ids.numpy(force=True).tobytes()
        cache = self._entries.get(key)
        if cache is None:
            kwargs = fresh_kwargs(self._model, self._model_kwargs, torch.ones_like(ids))
            outputs = prefill(self._model, ids, self._generation_config, kwargs)
            cache = find_cache({**kwargs, **outputs})  # some models return none
            assert cache is not None
            self._entries.add(key, cache)
        return deepcopy(cache)
