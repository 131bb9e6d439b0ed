"""The sources of `candidate_generator="auto"`, and its drafters for calls in several threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafting.blend import Blend
from ..drafting.drafter import Drafter
from ..drafting.reference_copy import ReferenceCopy
from ..drafting.sibling_copy import SiblingCopy
from ..drafting.token_recycling import TokenRecycling
from ..text_config import text_config
from ..verification.model_memo import memo_of


def default_sources(
    references: list[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    top_k: int = 8,
) -> list[Drafter]:
    """`ReferenceCopy` for what repeats, and `TokenRecycling` for the rest, with their arguments."""
    return [ReferenceCopy(references, tokenizer), TokenRecycling(top_k)]


def default_drafter(model: PreTrainedModel) -> AbstractContextManager[Drafter]:
    """The default sources of one call, blended, and `SiblingCopy` for rows that have one prompt.
    What they learn of a model is kept at the model; calls in several threads learn into one
    table."""
    vocab_size = text_config(model).vocab_size
    memo, key = memo_of(model), ("default drafters", vocab_size)
    if key not in memo:
        sources = default_sources(top_k=min(8, vocab_size))
        memo.setdefault(key, DrafterPool(Blend([*sources, SiblingCopy()])))
    pool: DrafterPool = memo[key]
    return pool.drafter()


class DrafterPool:
    """A drafter and, while a call has it, forks for further calls; what they learn they share as
    [`Drafter.fork`] says."""

    def __init__(self, drafter: Drafter) -> None:
        self._idle = [drafter]
        self._unused = drafter.fork()  # a drafter that a call has cannot be forked

    @contextmanager
    def drafter(self) -> Iterator[Drafter]:
        """A drafter that no other call has."""
        try:
            drafter = self._idle.pop()
        except IndexError:
            drafter = self._unused.fork()
        try:
            yield drafter
        finally:
            self._idle.append(drafter)
