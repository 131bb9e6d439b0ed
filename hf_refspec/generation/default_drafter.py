"""What `candidate_generator="auto"` drafts from."""

from __future__ import annotations

from contextlib import AbstractContextManager

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafting.blend import Blend
from ..drafting.drafter import Drafter
from ..drafting.reference_copy import ReferenceCopy
from ..drafting.token_recycling import TokenRecycling
from ..text_config import text_config
from ..verification.facts import facts_about
from .drafter_pool import DrafterPool


def default_sources(
    references: list[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    top_k: int = 8,
) -> list[Drafter]:
    """`ReferenceCopy` for what repeats, and `TokenRecycling` for the rest, with their arguments."""
    return [ReferenceCopy(references, tokenizer), TokenRecycling(top_k)]


def default_drafter(model: PreTrainedModel) -> AbstractContextManager[Drafter]:
    """The default sources of one call, blended. What they learn of a model is kept at the model;
    calls in several threads learn into one table.

    Args:
        model (`PreTrainedModel`): The target model.
    """
    vocab_size = text_config(model).vocab_size
    facts = facts_about(model)
    key = "default drafters", vocab_size
    pool: DrafterPool | None = facts.get(key)
    if pool is None:
        sources = default_sources(top_k=min(8, vocab_size))
        pool = facts.setdefault(key, DrafterPool(Blend(sources)))
    return pool.drafter()
