"""The model's input: a passage, the prompt and the output, with a cache for each passage.

The last few passages keep their caches, so that a passage that comes back costs no prefill. The
model computes the same with speculation and without: a passage and the prompt are always one pass,
the output follows in passes that depend only on the earlier passages, and undoing a step restores
every cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from ..drafting.tree import DraftTree
from ..generation.row import Row
from ..text_config import length_dependent_rope, text_config
from ..verification.caches import find_cache, fresh_kwargs
from ..verification.choice import select_verifier
from ..verification.passes import FixedTokens
from ..verification.verifier import PLAIN, Kind, Verifier

# Passages whose caches are kept: more of them save prefills, and take memory.
_PASSAGES = 4


@dataclass(eq=False)
class Context:
    """A passage, the prompt and the row's output: the model's input in place of the row, see
    [`Row.seen`]."""

    prefix: torch.Tensor  # passage and prompt, (1, p)
    verifier: Verifier
    _row: Row

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

    def prefill(self) -> None:
        """Runs passage and prompt in a pass of their own if output follows them already."""
        if self.verifier.cached or not self._row.output:
            return
        if not self.verifier.kind.takes_several_tokens:  # runs all at once
            self.verifier.begin_again(self)
        else:
            self.verifier.forward([FixedTokens(self.prefix)], [DraftTree.empty()])


@dataclass(frozen=True, slots=True)
class ContextChange:
    """The changes of a step: the contexts kept before it, and how to undo the one it entered if
    that was among them."""

    kept: OrderedDict[bytes, Context]
    entered: bytes
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
        self._kept: OrderedDict[bytes, Context] = OrderedDict()
        # Contexts of undone steps only: without any output.
        self._prefixes: OrderedDict[bytes, Context] = OrderedDict()

    def enter(self, passage: np.ndarray) -> tuple[Context, ContextChange]:
        """Returns the context of a passage (int64 ids) for the next step, and what `undo` needs."""
        key = passage.tobytes()
        kept = self._kept.copy()
        context = self._kept.pop(key, None)
        go_back = None if context is None else context.verifier.mark()
        if context is None and self._row.output:  # a first step needs the logits of the prefix
            context = self._prefixes.pop(key, None)
        self._kept[key] = context or self._new(passage)
        if len(self._kept) > _PASSAGES:
            self._kept.popitem(last=False)
        return self._kept[key], ContextChange(kept, key, go_back)

    def undo(self, change: ContextChange) -> None:
        """Undoes the last step."""
        context = self._kept[change.entered]
        self._kept = change.kept.copy()
        if change.go_back is not None:
            change.go_back()
        elif context.verifier.kind.takes_several_tokens and context.verifier.crop(
            context.prefix.shape[1]
        ):
            self._prefixes[change.entered] = context
            if len(self._prefixes) > _PASSAGES:
                self._prefixes.popitem(last=False)

    def _new(self, passage: np.ndarray) -> Context:
        prefix = torch.from_numpy(np.concatenate([self._begin, passage, self._prompt]))[None]
        prefix = prefix.to(self._row.ids.device)
        kwargs = self._model_kwargs
        if find_cache(kwargs) is not None:
            kwargs = fresh_kwargs(self._model, kwargs, torch.ones_like(prefix))
        verifier = Verifier(self.kind, self._model, self._generation_config, kwargs)
        return Context(prefix, verifier, self._row)
