"""The ways to decode that are compared: plain, transformers' own drafts, the papers', and ours."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..drafting.blend import Blend
from ..drafting.datastore_drafts import DatastoreDrafts
from ..drafting.drafter import Drafter
from ..drafting.reference_copy import ReferenceCopy
from ..drafting.sessions.retrieval_cache import RetrievalCache
from ..store.datastore import Datastore

PLAIN = "plain generate"
LOOK_UP = "prompt look-up of transformers"
BLEND = "blend"
T = TypeVar("T")
BUDGETS = (8, 16, 32, 64)
LOOK_UP_TOKENS = 10


@dataclass(frozen=True)
class Way:
    """One way to decode.

    Attributes:
        name (`str`): For people.
        nodes (`int` or `"auto"`): The most draft nodes in a forward pass.
        drafter ([`Drafter`], *optional*): If it is one of ours.
        options (`dict`): Further keyword arguments of `generate`.
    """

    name: str
    nodes: int | str
    drafter: Drafter | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of `generate`."""
        if self.drafter is None:
            return self.options
        ours = {"candidate_generator": self.drafter, "max_draft_tokens": self.nodes}
        return {**self.options, **ours}

    @property
    def cache(self) -> RetrievalCache | None:
        """The cache that it drafts from, if there is one."""
        sources = self.drafter.drafters if isinstance(self.drafter, Blend) else [self.drafter]
        return next((each for each in sources if isinstance(each, RetrievalCache)), None)


def mixed(ways: Sequence[T], seed: str) -> list[T]:
    """In another order for each seed: whoever is always first always meets cold caches."""
    return random.Random(seed).sample(ways, len(ways))


def make_ways(store: Datastore | None = None) -> list[Way]:
    """All ways, plain decoding first, with drafters that have seen nothing yet.

    Each has drafters of its own, so that a cache holds no answer before it is its turn.

    Args:
        store ([`Datastore`], *optional*): To draft from as well.
    """
    chain = {"verification": "chain"}
    ways = [
        Way(PLAIN, 0),
        Way(LOOK_UP, LOOK_UP_TOKENS, options={"prompt_lookup_num_tokens": LOOK_UP_TOKENS}),
        Way("LLMA's algorithm", 18, ReferenceCopy(mode="llma", copy_length=18), chain),
        Way("ReferenceCopy", "auto", ReferenceCopy()),
        Way("ReferenceCopy", 64, ReferenceCopy()),
        Way("RetrievalCache", "auto", RetrievalCache()),
    ]
    if store is not None:
        if store.form == "full":
            ways.append(Way("REST's algorithm", 64, DatastoreDrafts(store, mode="rest")))
        ways.append(Way("DatastoreDrafts", "auto", DatastoreDrafts(store)))
    return [*ways, *(Way(BLEND, nodes, _blend(store)) for nodes in ("auto", *BUDGETS))]


def _blend(store: Datastore | None) -> Drafter:
    blend = ReferenceCopy() | RetrievalCache()
    return blend if store is None else blend | DatastoreDrafts(store)
