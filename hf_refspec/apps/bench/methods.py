"""The methods that are compared: plain decoding, transformers' drafts, the papers', and ours."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import CompileConfig

from ...drafting.blend import Blend
from ...drafting.datastore_drafts import DatastoreDrafts
from ...drafting.drafter import Drafter
from ...drafting.reference_copy import ReferenceCopy
from ...drafting.sessions.retrieval_cache import RetrievalCache
from ...drafting.token_recycling import TokenRecycling
from ...store.datastore import Datastore

PLAIN = "plain generate"
LOOK_UP = "prompt look-up of transformers"
LOOK_UP_TOKENS = 10
LLMA, LLMA_TOKENS = "LLMA's algorithm", 18
RECYCLING = "Token Recycling's algorithm"
DEFAULT = "ReferenceCopy | TokenRecycling"  # candidate_generator="auto"
BLEND = "blend"
COMPILED, REPRODUCIBLE = "compiled", "reproducible"
BUDGETS = ("auto", 8, 16, 64)


@dataclass(frozen=True)
class Method:
    """A method of decoding: a name for the tables, and the arguments of `generate`."""

    name: str
    nodes: int | str = 0  # the draft budget
    drafter: Drafter | None = None  # one of ours
    options: dict[str, Any] = field(default_factory=dict)
    retrieves: bool = False  # while it generates, and so writes another text

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of `generate`."""
        if self.drafter is None:
            return self.options
        ours = {"candidate_generator": self.drafter, "max_draft_tokens": self.nodes}
        return {**self.options, **ours}

    @property
    def cache(self) -> RetrievalCache | None:
        """The session cache among its sources."""
        sources = self.drafter.drafters if isinstance(self.drafter, Blend) else [self.drafter]
        return next((each for each in sources if isinstance(each, RetrievalCache)), None)


def transformers_methods() -> list[Method]:
    """Plain decoding, and transformers' prompt look-up."""
    options = {"prompt_lookup_num_tokens": LOOK_UP_TOKENS}
    return [Method(PLAIN), Method(LOOK_UP, LOOK_UP_TOKENS, options=options)]


def static_options(length: int, device: str) -> dict[str, Any]:
    """The arguments of `generate` for compiled passes over a cache of one length, so that no text
    causes another compilation."""
    static: dict[str, Any] = {"cache_implementation": "static", "max_cache_len": length}
    if device == "cpu":  # where `generate` does not compile by default
        config: Any = CompileConfig(mode="default")
        config._compile_all_devices = True
        static["compile_config"] = config
    return static


def compiled_methods(static: dict[str, Any], nodes: Sequence[int | str]) -> list[Method]:
    """Compiled and reproducible decoding, plain and drafted, with [`static_options`]."""
    reproducible = {**static, "verification": REPRODUCIBLE}
    return [
        Method(f"{PLAIN}, {COMPILED}", options=static),
        *(Method(f"{DEFAULT}, {COMPILED}", each, default_drafter(), static) for each in nodes),
        Method(f"{PLAIN}, {REPRODUCIBLE}", options=reproducible),
        Method(f"{DEFAULT}, {REPRODUCIBLE}", "auto", default_drafter(), reproducible),
    ]


def default_drafter() -> Drafter:
    """What `candidate_generator="auto"` is."""
    return ReferenceCopy() | TokenRecycling()


def decoding_methods(
    store: Datastore | None = None,
    recycles: bool = True,
    nodes: Sequence[int | str] = BUDGETS,
    table: TokenRecycling | None = None,
) -> list[Method]:
    """All methods without retrieval, plain decoding first.

    Each has its own new drafters, so that no cache holds an answer of another method; one more
    starts from the `table`. Without `recycles`, as in a replay, token recycling is left out: the
    logits of a model that is forced say nothing about its text.
    """
    chain = {"verification": "chain"}
    methods = [
        *transformers_methods(),
        Method(LLMA, LLMA_TOKENS, _llma(), chain),
        *(Method("ReferenceCopy", each, ReferenceCopy()) for each in nodes),
        Method("RetrievalCache", "auto", RetrievalCache()),
    ]
    if recycles:
        fixed = [each for each in nodes if each != "auto"]
        methods += [
            *(Method(RECYCLING, each, TokenRecycling(mode="published")) for each in fixed),
            Method("TokenRecycling", "auto", TokenRecycling()),
            *(Method(DEFAULT, each, default_drafter()) for each in nodes),
        ]
    if table is not None:
        methods += (
            Method(f"{DEFAULT}, with a table", each, ReferenceCopy() | copy.deepcopy(table))
            for each in nodes
        )
    if store is not None:
        if store.form == "full":
            methods.append(Method("REST's algorithm", 64, DatastoreDrafts(store, mode="rest")))
        methods += (Method("DatastoreDrafts", each, DatastoreDrafts(store)) for each in nodes)
    return [*methods, *(Method(BLEND, each, _blend(store, recycles)) for each in nodes)]


def with_references(
    methods: list[Method], references: Sequence[Sequence[int]] | None
) -> list[Method]:
    """The methods for a question that has references: LLMA copies from these alone, and from the
    prompt where there are none."""
    llma = _llma(references)
    return [replace(each, drafter=llma) if each.name == LLMA else each for each in methods]


def _llma(references: Sequence[Sequence[int]] | None = None) -> Drafter:
    return ReferenceCopy(references, mode="llma", copy_length=LLMA_TOKENS)


def _blend(store: Datastore | None, recycles: bool) -> Drafter:
    blend = ReferenceCopy() | RetrievalCache()
    if recycles:
        blend = blend | TokenRecycling()
    return blend if store is None else blend | DatastoreDrafts(store)
