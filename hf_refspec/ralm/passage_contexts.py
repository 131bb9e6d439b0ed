"""What the model sees: a passage, the prompt and the output, with a cache for each passage.

A text is continued behind one passage after another. All that follows a passage depends on it, so
each has a cache of its own. The caches of the last few passages are kept, and catch up where the
text has gone on behind another one.

The logits must be the same whether or not something was speculated and taken back in between, to
the last bit: the sum of the same numbers in another order is another sum. So a cache is filled by
the same passes either way. A passage and the prompt are always one pass, the output follows in
passes that only depend on the passages that the text has had, and a step that is taken back leaves
every cache as it was before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from ..drafting.tree import DraftTree
from ..generation.row import TargetText
from ..verification.positions import length_dependent_rope
from ..verification.probe import select_verification
from ..verification.verifier import (
    CACHE_NAMES,
    RecurrentVerification,
    Verification,
    all_plain_attention,
    find_cache,
    new_cache,
    restore,
    snapshot,
)

# Keyword arguments of the forward pass that are the same for every passage.
FORWARDED = ("use_cache", "logits_to_keep")
# The passages whose caches are kept.
_PASSAGES = 4


@dataclass(frozen=True, slots=True)
class ContextMark:
    """Where a context was: what its passes knew, and the states of the cache's layers where these
    cannot be cropped."""

    passes: Verification
    length: int
    pending: int
    last_position: int
    restarted: bool
    cache: Cache
    model_kwargs: dict[str, Any]
    layers: list[dict[str, Any]] | None


class Context:
    """A passage with the text behind it, and the model's cache of both.

    Args:
        make_passes (callable): Makes forward passes with an empty cache, the first of them over so
            many tokens.
        prefix (`torch.LongTensor` of shape `(1, p)`): The passage and the prompt.

    Attributes:
        prefix (`torch.LongTensor`): See above.
    """

    def __init__(self, make_passes: Callable[[int], Verification], prefix: torch.Tensor) -> None:
        self.prefix = prefix
        self._make_passes = make_passes
        self._passes: Verification | None = None
        # The tokens that the passes know of, of which the last ones, the pending, are not cached.
        self._length = 0
        self._after_prefix: ContextMark | None = None

    def takes_draft(self, output_length: int) -> bool:
        """Whether the next pass can verify a draft behind so many tokens of output."""
        if self._passes is None or self._passes.restarted:
            return False
        # The mask of a tree has a single root.
        length = self.prefix.shape[1] + output_length
        return not self._passes.takes_trees or self._pending_at(length) == 1

    def extend(self, output: torch.Tensor, draft: DraftTree, text: TargetText) -> torch.Tensor:
        """A forward pass over what the cache does not hold yet and a draft; the text takes what
        follows from it.

        Args:
            output (`torch.LongTensor` of shape `(1, length)`): What was generated so far.
            draft ([`DraftTree`]): T nodes; none unless `takes_draft` says so.
            text ([`TargetText`]): Accepts the tokens.

        Returns:
            `torch.Tensor` of shape `(1 + T, vocab_size)`: the logits after the last token and after
            each node.
        """
        if self._passes is None:
            logits = self._prefill(self.prefix)
            if self._crops:
                self._after_prefix = self.mark()
            if output.shape[1] == 0:
                text.accept(logits, draft)
                return logits
        return self._go_on(torch.cat([self.prefix, output], dim=-1), draft, text)

    def mark(self) -> ContextMark | None:
        """The present, to which it can go back as long as it has only grown."""
        passes = self._passes
        assert passes is not None, "nothing was generated yet"
        return ContextMark(
            passes,
            self._length,
            passes.pending,
            passes.last_position,
            passes.restarted,
            passes.cache,
            passes.model_kwargs,
            None if self._crops else snapshot(passes.cache),
        )

    def roll_back(self, mark: ContextMark | None) -> None:
        """Goes back to a mark."""
        assert mark is not None
        passes = mark.passes
        if mark.layers is None:
            mark.cache.crop((mark.length - mark.pending) - (self._length - passes.pending))
        else:
            restore(mark.cache, mark.layers)
        self._passes, self._length = passes, mark.length
        passes.pending = mark.pending
        passes.last_position = mark.last_position
        passes.restarted = mark.restarted
        passes.cache = mark.cache
        passes.model_kwargs = mark.model_kwargs

    def roll_back_to_prefix(self) -> bool:
        """Drops all but the passage and the prompt, if it can; says whether it could."""
        if self._after_prefix is None:
            return False
        self.roll_back(self._after_prefix)
        return True

    @property
    def _crops(self) -> bool:
        return self._passes is not None and all_plain_attention(self._passes.cache)

    def _pending_at(self, length: int) -> int:
        """How many tokens the cache lacks when the context has so many."""
        return 0 if self._passes is None else self._passes.pending + length - self._length

    def _prefill(self, ids: torch.Tensor) -> torch.Tensor:
        self._passes = self._make_passes(ids.shape[1])
        logits = self._passes.prefill(ids)
        self._length = ids.shape[1] + 1  # the passes count the token that will be chosen
        return logits

    def _go_on(self, ids: torch.Tensor, draft: DraftTree, text: TargetText) -> torch.Tensor:
        passes = self._passes
        assert passes is not None
        new = ids.shape[1] - self._length
        passes.pending += new
        passes.last_position += new
        passes.model_kwargs = passes._extended_kwargs(new)
        logits = passes.verify(ids, draft)
        text.accept(logits, draft)
        passes.commit(draft, text.path)
        if not isinstance(passes, RecurrentVerification):  # which may have to run tokens again
            passes.pending = 1
        self._length = ids.shape[1] + len(text.path) + 1
        return logits


class PlainPasses(Verification):
    """A pass over everything, then one for each token."""

    name = "plain"

    def _keep(self, draft: DraftTree, path: list[int]) -> None:
        """There is never a draft."""


class PlainContext(Context):
    """For models that cannot take several tokens behind a cache, or not always: after another
    passage, everything is run again."""

    _crops = False  # what was run again is another cache

    def takes_draft(self, output_length: int) -> bool:
        return False

    def extend(self, output: torch.Tensor, draft: DraftTree, text: TargetText) -> torch.Tensor:
        ids = torch.cat([self.prefix, output], dim=-1)
        if self._passes is not None and self._pending_at(ids.shape[1]) == 1:
            return self._go_on(ids, draft, text)
        logits = self._prefill(ids)
        text.accept(logits, draft)
        return logits


class UncachedContext(Context):
    """For models whose state is not in a cache that could be kept: everything is run again for each
    token."""

    def __init__(self, model: PreTrainedModel, prefix: torch.Tensor) -> None:
        self.prefix = prefix
        self._model = model

    def takes_draft(self, output_length: int) -> bool:
        return False

    def extend(self, output: torch.Tensor, draft: DraftTree, text: TargetText) -> torch.Tensor:
        ids = torch.cat([self.prefix, output], dim=-1)
        logits = self._model(input_ids=ids, use_cache=False, return_dict=True).logits[0, -1:]
        text.accept(logits, draft)
        return logits

    def mark(self) -> None:
        return None

    def roll_back(self, mark: ContextMark | None) -> None:
        """There is no state."""

    def roll_back_to_prefix(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class ContextChange:
    """What a step has changed: the contexts that were kept before it, and the state of the one that
    it went on with, if that was there."""

    kept: OrderedDict[bytes, Context]
    entered: bytes
    mark: ContextMark | None


class PassageContexts:
    """The contexts of the last few passages.

    Args:
        model (`PreTrainedModel`): The target model.
        generation_config (`GenerationConfig`): The call's own.
        model_kwargs (`dict`): Keyword arguments of the forward pass as `generate` prepared them; of
            these the kind of cache counts, and whether the model takes positions.
        begin, prompt (`np.ndarray`, int64): What stands before the passage (a BOS token or
            nothing), and what stands behind it.
        device (`torch.device`): Where the ids are.

    Attributes:
        takes_trees (`bool`): Whether drafts may branch.
        verification (`str`): The name of the way in which they are verified.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        begin: np.ndarray,
        prompt: np.ndarray,
        device: torch.device,
    ) -> None:
        self._model = model
        self._generation_config = generation_config
        self._model_kwargs = model_kwargs
        self._begin = begin
        self._prompt = prompt
        self._device = device
        self._way = self._passes_of(model)
        self.takes_trees = self._way is not None and self._way.takes_trees
        self.verification = "none" if self._way is None else self._way.__name__
        self._kept: OrderedDict[bytes, Context] = OrderedDict()
        # Those that only steps which were taken back had: none of their output is left.
        self._prefixes: OrderedDict[bytes, Context] = OrderedDict()

    def enter(self, passage: np.ndarray) -> tuple[Context, ContextChange]:
        """The context of a passage (int64 ids), for a step to go on with.

        Returns:
            It, and what `undo` needs.
        """
        key = passage.tobytes()
        kept = self._kept.copy()
        context = self._kept.pop(key, None)
        mark = None if context is None else context.mark()
        self._kept[key] = context or self._prefixes.pop(key, None) or self._new(passage)
        if len(self._kept) > _PASSAGES:
            self._kept.popitem(last=False)
        return self._kept[key], ContextChange(kept, key, mark)

    def undo(self, change: ContextChange) -> None:
        """Takes back the last step that was not taken back yet."""
        context = self._kept[change.entered]
        self._kept = change.kept.copy()
        if change.entered in self._kept:
            context.roll_back(change.mark)
        elif context.roll_back_to_prefix():
            self._prefixes[change.entered] = context
            if len(self._prefixes) > _PASSAGES:
                self._prefixes.popitem(last=False)

    def _new(self, passage: np.ndarray) -> Context:
        prefix = np.concatenate([self._begin, passage, self._prompt])
        prefix_ids = torch.from_numpy(prefix)[None].to(self._device)
        if self._way is None:
            return UncachedContext(self._model, prefix_ids)
        kind = PlainContext if self._way is PlainPasses else Context
        return kind(self._make_passes, prefix_ids)

    def _passes_of(self, model: PreTrainedModel) -> type[Verification] | None:
        """How forward passes are made: `None` without any cache."""
        if find_cache(self._model_kwargs) is None:
            return None
        if length_dependent_rope(model.config.get_text_config(decoder=True)):
            return PlainPasses
        passes = select_verification(model, "auto", self._generation_config, self._model_kwargs)
        return PlainPasses if passes is None else type(passes)

    def _make_passes(self, length: int) -> Verification:
        assert self._way is not None
        given = self._model_kwargs
        cache_name = next(name for name in CACHE_NAMES if given.get(name) is not None)
        kwargs: dict[str, Any] = {cache_name: new_cache(self._model)}
        kwargs |= {name: given[name] for name in FORWARDED if name in given}
        if (position_ids := given.get("position_ids")) is not None:
            # Of the same shape but for the length: some models have several for each token.
            positions = torch.arange(length, device=position_ids.device)
            kwargs["position_ids"] = positions.expand(*position_ids.shape[:-1], length)
        return self._way(self._model, self._generation_config, kwargs)
