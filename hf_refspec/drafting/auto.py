"""Drafters made of the values that users give: `"auto"`, a datastore, a transformers generator."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import CandidateGenerator

from ..messages import did_you_mean
from ..text_config import text_tokenizer
from .candidates import CandidateChain
from .contract import Drafter
from .hidden_state_drafts import HiddenStateDrafts
from .reference_copy import ReferenceCopy
from .sibling_copy import SiblingCopy
from .token_recycling import TokenRecycling

logger = logging.getLogger("hf_refspec")

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


def check_datastores(
    generator: Any, model: PreTrainedModel, tokenizer: Any, memo: dict[Any, Any]
) -> None:
    """Warns, once for each, of datastores in a `candidate_generator` that were made with another
    tokenizer than the call's; if the call has none, than the one that is stored with the model on
    this machine, unless that has the same name. The model's `memo` keeps what was compared. No
    datastore is refused: the text is the same, and the user may have extended the tokenizer."""
    sources = generator.sources if isinstance(generator, Drafter) else [generator]
    stores = [getattr(source, "store", source) for source in sources]
    if all(store is None or isinstance(store, (Drafter, str)) for store in stores):
        return
    from ..store.datastore import Datastore
    from ..store.files import DatastoreError
    from ..store.names import local_tokenizer
    from ..store.stored_tokenizer import public_name

    known = text_tokenizer(tokenizer)
    known = known if getattr(known, "is_fast", False) else None
    for store in stores:
        if not isinstance(store, Datastore):
            continue
        key = ("datastore", store.config.fingerprint, known is None)
        if key in memo:
            continue
        memo[key] = True
        compared = known
        if known is None and store.config.tokenizer != public_name(model):
            compared = local_tokenizer(getattr(model, "name_or_path", ""))
        try:
            if compared is not None:
                store.check_tokenizer(compared)
        except DatastoreError as error:
            logger.warning("hardly any draft of this datastore will be accepted: %s", error)
