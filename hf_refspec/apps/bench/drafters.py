"""Drafters by their names, such as `ReferenceCopy | DatastoreDrafts=org/store`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import or_

from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from ...did_you_mean import did_you_mean
from ...drafting.blend import Blend
from ...drafting.datastore_drafts import DatastoreDrafts
from ...drafting.draft_model import DraftModel
from ...drafting.drafter import Drafter
from ...drafting.reference_copy import ReferenceCopy
from ...drafting.sessions.retrieval_cache import RetrievalCache
from ...drafting.token_recycling import TokenRecycling
from ...generation.default_drafter import default_sources
from ...store.datastore import Datastore

BY_NAME: dict[str, Callable[[], Drafter]] = {
    "auto": lambda: Blend(default_sources()),
    "ReferenceCopy": ReferenceCopy,
    "RetrievalCache": RetrievalCache,
    "TokenRecycling": TokenRecycling,
    # the algorithms as they were published
    "LLMA": partial(ReferenceCopy, mode="llma", copy_length=18),
    "PublishedRecycling": partial(TokenRecycling, mode="published"),
}
# With the folder or Hub id of a datastore, of a model, or of a recycling table.
OF_A_NAME = ("DatastoreDrafts=STORE", "REST=STORE", "DraftModel=MODEL", "TokenRecycling=TABLE")


def drafter_named(text: str, tokenizer: PreTrainedTokenizerBase) -> Callable[[], Drafter]:
    """What returns a new drafter of that name; raises `ValueError` for an unknown one."""
    parts = [_part(part.strip(), tokenizer) for part in text.split("|")]
    return lambda: reduce(or_, [part() for part in parts])


def _part(text: str, tokenizer: PreTrainedTokenizerBase) -> Callable[[], Drafter]:
    name, _, value = text.partition("=")
    if value and name in ("DatastoreDrafts", "REST"):
        store = Datastore.from_pretrained(value, tokenizer=tokenizer)
        return partial(DatastoreDrafts, store, mode="rest" if name == "REST" else "mixed")
    if value and name == "DraftModel":
        assistant = AutoModelForCausalLM.from_pretrained(value, dtype="auto").eval()
        return partial(DraftModel, assistant)
    if value and name == "TokenRecycling":
        return partial(TokenRecycling.from_pretrained, value, tokenizer)
    if text not in BY_NAME:
        known = [*BY_NAME, *OF_A_NAME]
        raise ValueError(
            f"--drafters {text!r} is none of {', '.join(known)}, nor several of them, as in "
            f'"ReferenceCopy | TokenRecycling"{did_you_mean(text, known)}'
        )
    return BY_NAME[text]
