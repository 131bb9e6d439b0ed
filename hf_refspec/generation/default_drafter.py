"""The drafters of `candidate_generator="auto"`, for calls in several threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from transformers import PreTrainedModel

from ..drafting.blend import Blend
from ..drafting.candidates import default_sources
from ..drafting.drafter import Drafter, owned, sources_of
from ..drafting.sibling_copy import SiblingCopy
from ..drafting.token_recycling import TokenRecycling
from ..text_config import text_config
from ..verification.model_memo import memo_of


def drafter_of_call(
    model: PreTrainedModel, given: Drafter | None = None
) -> AbstractContextManager[Drafter]:
    """What drafts in a call: a given drafter, or by default the default sources, blended, and
    `SiblingCopy` for rows that have one prompt. What these learn of a model is kept at the model,
    also by `"auto" | other`; calls in several threads learn into one table."""
    sources = [] if given is None else sources_of(given)
    recycling = [own for own in sources if isinstance(own, TokenRecycling) and own.kept_at_model]
    if given is not None and not recycling:
        return nullcontext(given)
    vocab_size = text_config(model).vocab_size
    memo, key = memo_of(model), ("default drafters", vocab_size)
    if key not in memo:
        sources = default_sources(top_k=min(8, vocab_size))
        memo.setdefault(key, (DrafterPool(Blend([*sources, SiblingCopy()])), sources[1]))
    pool, kept = memo[key]
    if given is None:
        return pool.drafter()
    with owned(given):
        for source in recycling:
            source.learns_into(kept)
    return nullcontext(given)


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
