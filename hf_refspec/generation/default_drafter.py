"""The drafters of `candidate_generator="auto"`, for calls in several threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from transformers import PreTrainedModel

from ..drafting.candidates import as_drafter
from ..drafting.drafter import Drafter, owned
from ..drafting.token_recycling import TokenRecycling
from ..text_config import text_config
from ..verification.model_memo import memo_of


@contextmanager
def drafter_of_call(model: PreTrainedModel, given: Drafter | None = None) -> Iterator[Drafter]:
    """What drafts in a call: a given drafter, or that of "auto". What the sources of "auto" learn
    of a model is kept at the model, also by `"auto" | other`; calls in several threads learn into
    one table."""
    memo, vocab_size = memo_of(model), text_config(model).vocab_size
    pool, table = ("default drafters", vocab_size), ("default table", vocab_size)
    if given is None and pool not in memo:
        memo.setdefault(pool, DrafterPool(as_drafter("auto")))
    with memo[pool].drafter() if given is None else nullcontext(given) as drafter:
        for source in drafter.sources:
            if isinstance(source, TokenRecycling) and source.kept_at_model:
                kept = memo.setdefault(table, TokenRecycling(min(8, vocab_size)))
                with owned(drafter):
                    source.learns_into(kept)
        yield drafter


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
