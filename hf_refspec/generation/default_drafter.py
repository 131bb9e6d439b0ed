"""What `candidate_generator="auto"` drafts from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafting.blend import Blend
from ..drafting.drafter import Drafter
from ..drafting.reference_copy import ReferenceCopy
from ..drafting.token_recycling import TokenRecycling
from ..verification.facts import facts_about


def default_sources(
    references: list[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    top_k: int = 8,
) -> list[Drafter]:
    """`ReferenceCopy` for what repeats, and `TokenRecycling` for the rest, with their arguments."""
    return [ReferenceCopy(references, tokenizer), TokenRecycling(top_k)]


@contextmanager
def default_drafter(model: PreTrainedModel) -> Iterator[Drafter]:
    """The default sources of one call, blended. What they learn of a model is kept at the model;
    calls in several threads learn into one table.

    Args:
        model (`PreTrainedModel`): The target model.
    """
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    facts = facts_about(model)
    pool = facts.get(("default drafters", vocab_size))
    if pool is None:
        pool = facts.setdefault(("default drafters", vocab_size), _Pool(vocab_size))
    try:
        drafter = pool.idle.pop()
    except IndexError:
        drafter = pool.first.fork()
    try:
        yield drafter
    finally:
        pool.idle.append(drafter)


class _Pool:
    """Drafters that no call has at present, and one that no call ever has, which is forked."""

    def __init__(self, vocab_size: int) -> None:
        self.first: Drafter = Blend(default_sources(top_k=min(8, vocab_size)))
        self.idle: list[Drafter] = []
