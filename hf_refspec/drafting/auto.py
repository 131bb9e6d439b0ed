"""The drafter `"auto"`: its sources, and the table and the pool that each model keeps."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from .blend import Blend
from .contract import Drafter, DrafterPool
from .reference_copy import ReferenceCopy
from .sibling_copy import SiblingCopy
from .token_recycling import TokenRecycling


def default_sources(
    references: list[str] | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[ReferenceCopy, TokenRecycling]:
    """`ReferenceCopy` for what repeats, and `TokenRecycling` for the rest."""
    return ReferenceCopy(references, tokenizer), TokenRecycling()


def auto_drafter() -> Blend:
    """The default sources, with the table that a call's model keeps, and the call's other rows."""
    copy, recycling = default_sources()
    recycling.kept_at_model = True
    return Blend([copy, recycling, SiblingCopy()])


def share_table(drafter: Drafter, memo: MutableMapping[Any, Any], vocab_size: int) -> None:
    """Lets the `TokenRecycling` of `"auto"` learn into the one table that a model's findings keep
    for it."""
    for source in drafter.sources:
        if isinstance(source, TokenRecycling) and source.kept_at_model:
            table = TokenRecycling(min(8, vocab_size))
            source.learns_into(memo.setdefault(("default table", vocab_size), table))


def default_drafters(memo: MutableMapping[Any, Any], vocab_size: int) -> DrafterPool:
    """The drafters of `"auto"` that a model's findings keep, for calls in several threads."""
    key = ("default drafters", vocab_size)
    if key not in memo:
        drafter = auto_drafter()
        share_table(drafter, memo, vocab_size)
        memo.setdefault(key, DrafterPool(drafter))
    pool: DrafterPool = memo[key]
    return pool
