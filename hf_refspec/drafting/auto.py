"""Drafters made of the values that users give: `"auto"`, a datastore, a transformers generator."""

from __future__ import annotations

import os
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import CandidateGenerator

from ..messages import did_you_mean
from .candidates import CandidateChain, HiddenStateDrafts
from .contract import Drafter
from .reference_copy import ReferenceCopy
from .sibling_copy import SiblingCopy
from .token_recycling import TokenRecycling

# How the drafters that users name are constructed, for messages.
_CONSTRUCTORS = {
    "referencecopy": "rs.ReferenceCopy()",
    "tokenrecycling": "rs.TokenRecycling()",
    "sessiondrafts": "rs.SessionDrafts()",
    "siblingcopy": "rs.SiblingCopy()",
    "datastoredrafts": "rs.DatastoreDrafts(store)",
    "draftmodel": "rs.DraftModel(assistant)",
    "grammardrafts": "rs.GrammarDrafts(tokenizer, json_schema=...)",
}


def default_sources(
    references: list[str] | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[ReferenceCopy, TokenRecycling]:
    """`ReferenceCopy` for what repeats, and `TokenRecycling` for the rest."""
    return ReferenceCopy(references, tokenizer), TokenRecycling()


def sources_of(value: Any, role: str) -> Sequence[Drafter]:
    """The drafters that draft in calls with this `candidate_generator` or source of a blend.

    `"auto"` stands for the default sources, with the table that a call's model keeps, and for the
    call's other rows. Raises a TypeError, which names the argument by its `role`, for what does not
    draft."""
    if isinstance(value, Drafter):
        return value.sources
    if isinstance(value, str) and value == "auto":
        copy, recycling = default_sources()
        recycling.kept_at_model = True
        return [copy, recycling, SiblingCopy()]
    if isinstance(value, CandidateGenerator):
        return [HiddenStateDrafts(value) if value.requires_model_outputs else CandidateChain(value)]
    from ..store.datastore import Datastore  # loaded only where a store is given
    from .datastore_drafts import DatastoreDrafts

    if isinstance(value, Datastore):
        return [DatastoreDrafts(value)]
    raise TypeError(
        f'{role} must be "auto", a drafter of hf_refspec or a transformers `CandidateGenerator`, '
        f"but is {_shown_with_remedy(value)}."
    )


def _shown_with_remedy(value: Any) -> str:
    """Describes an argument that is not a drafter, and how to draft from it, for a message."""
    is_name = isinstance(value, str | os.PathLike | type)
    remedies: dict[Any, str] = {
        type: "pass an instance, not the class",
        PreTrainedModel: "a model drafts as `rs.DraftModel(model)`",
        (list, tuple): "join drafters with `|`, as in `rs.ReferenceCopy() | store`",
        (str, os.PathLike): "open a datastore by `rs.Datastore.from_pretrained(repo_or_path)`",
    }
    remedy = next((f": {remedies[kind]}" for kind in remedies if isinstance(value, kind)), "")
    if isinstance(value, str):
        name = value.removeprefix("rs.").partition("(")[0].replace("_", "").lower()
        close = get_close_matches(name, _CONSTRUCTORS, n=1, cutoff=0.9)
        named = f": pass `{_CONSTRUCTORS[close[0]]}`, not its name" if close else ""
        remedy = named or did_you_mean(value, ["auto"]) or remedy
    return f"{value!r}{remedy}" if is_name else f"of the type {type(value).__name__}{remedy}"
