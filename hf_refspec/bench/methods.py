"""The methods that are compared: plain decoding, transformers' drafts, the papers', and ours."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..drafting.blend import Blend
from ..drafting.datastore_drafts import DatastoreDrafts
from ..drafting.drafter import Drafter
from ..drafting.reference_copy import ReferenceCopy
from ..drafting.sessions.retrieval_cache import RetrievalCache
from ..ralm.options import Speculation
from ..store.datastore import Datastore

PLAIN = "plain generate"
LOOK_UP = "prompt look-up of transformers"
LOOK_UP_TOKENS = 10
BLEND = "blend"
BUDGETS = (8, 16, 32, 64)
# Of retrieval: waiting for every search, RaLMSpec with all three of its boosters, and ours.
BASELINE, PUBLISHED, OURS = "baseline", "as published, psa", "ours, psa"
STRIDES = range(1, 9)
T = TypeVar("T")


@dataclass(frozen=True)
class Method:
    """One way to call `generate`.

    Attributes:
        name (`str`): For people.
        nodes (`int` or `"auto"`): The most draft nodes in a forward pass.
        drafter ([`Drafter`], *optional*): If it is one of ours.
        options (`dict`): Further keyword arguments of `generate`.
        retrieves (`bool`): Whether the call retrieves, and so has [`RetrievalStats`].
    """

    name: str
    nodes: int | str = 0
    drafter: Drafter | None = None
    options: dict[str, Any] = field(default_factory=dict)
    retrieves: bool = False

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


def mixed(methods: Sequence[T], seed: str) -> list[T]:
    """In another order for each seed: whoever is always first always meets cold caches."""
    return random.Random(seed).sample(methods, len(methods))


def transformers_methods() -> list[Method]:
    """Plain decoding, and with transformers' own drafts."""
    options = {"prompt_lookup_num_tokens": LOOK_UP_TOKENS}
    return [Method(PLAIN), Method(LOOK_UP, LOOK_UP_TOKENS, options=options)]


def decoding_methods(store: Datastore | None = None) -> list[Method]:
    """All methods to decode, plain decoding first.

    Each has drafters of its own that have seen nothing yet, so that a cache holds no answer before
    it is its turn.

    Args:
        store ([`Datastore`], *optional*): To draft from as well.
    """
    chain = {"verification": "chain"}
    methods = [
        *transformers_methods(),
        Method("LLMA's algorithm", 18, ReferenceCopy(mode="llma", copy_length=18), chain),
        Method("ReferenceCopy", "auto", ReferenceCopy()),
        Method("ReferenceCopy", 64, ReferenceCopy()),
        Method("RetrievalCache", "auto", RetrievalCache()),
    ]
    if store is not None:
        if store.form == "full":
            methods.append(Method("REST's algorithm", 64, DatastoreDrafts(store, mode="rest")))
        methods.append(Method("DatastoreDrafts", "auto", DatastoreDrafts(store)))
    return [*methods, *(Method(BLEND, nodes, _blend(store)) for nodes in ("auto", *BUDGETS))]


def _blend(store: Datastore | None) -> Drafter:
    blend = ReferenceCopy() | RetrievalCache()
    return blend if store is None else blend | DatastoreDrafts(store)


def main_speculations() -> dict[str, Speculation | None]:
    """The baseline, RaLMSpec as published (arXiv 2401.14021) and ours."""
    return {BASELINE: None, PUBLISHED: Speculation.published("psa"), OURS: Speculation()}


def ablations() -> dict[str, Speculation | None]:
    """The published one without some of its three boosters (Tables 1 and 4)."""
    letters = ("", "p", "s", "a", "ps", "pa", "sa")
    return {f"as published, {each or 'none'}": Speculation.published(each) for each in letters}


def strides() -> dict[str, Speculation | None]:
    """What the stride scheduler is held against; everything else is as in ours."""
    return {
        **{stride_name(each, True): Speculation(stride=each) for each in STRIDES},
        **{
            stride_name(each, False): Speculation(stride=each, asynchronous=False)
            for each in STRIDES
        },
        scheduled_name(False): Speculation(asynchronous=False),
    }


def stride_name(stride: int, asynchronous: bool) -> str:
    """The method with a fixed stride."""
    return f"stride {stride}{', asynchronous' if asynchronous else ''}"


def scheduled_name(asynchronous: bool) -> str:
    """The method whose stride OS3 chooses, all else being equal."""
    return OURS if asynchronous else "ours, ps"


def retrieving_methods(
    speculations: Mapping[str, Speculation | None], **options: Any
) -> list[Method]:
    """A method for each speculation, by name, with further keyword arguments of `generate`."""
    return [
        Method(name, options={**options, "speculation": speculation}, retrieves=True)
        for name, speculation in speculations.items()
    ]
