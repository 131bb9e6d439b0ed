"""The methods that are compared: plain decoding, transformers' drafts, the papers', and ours."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import CompileConfig

from ...drafting.blend import Blend
from ...drafting.datastore_drafts import DatastoreDrafts
from ...drafting.drafter import Drafter
from ...drafting.reference_copy import ReferenceCopy
from ...drafting.sessions.retrieval_cache import RetrievalCache
from ...drafting.token_recycling import TokenRecycling
from ...ralm.options import Speculation
from ...store.datastore import Datastore

PLAIN = "plain generate"
LOOK_UP = "prompt look-up of transformers"
LOOK_UP_TOKENS = 10
RECYCLING = "Token Recycling's algorithm"
DEFAULT = "ReferenceCopy | TokenRecycling"  # what candidate_generator="auto" is
BLEND = "blend"
COMPILED, REPRODUCIBLE = "compiled", "reproducible"
BUDGETS = ("auto", 8, 16, 64)
DEFAULTS = "defaults", 64  # of token recycling, beside its other settings
# Retrieval that waits for every search, RaLMSpec with its three boosters, and ours.
BASELINE, PUBLISHED, OURS = "baseline", "as published, psa", "ours, psa"


@dataclass(frozen=True)
class Method:
    """A method of decoding: the arguments of a `generate`.

    Attributes:
        name (`str`): For the tables.
        nodes (`int` or `"auto"`): The draft budget.
        drafter ([`Drafter`], *optional*): If it is one of ours.
        options (`dict`): Further keyword arguments of `generate`.
        retrieves (`bool`): Whether it is retrieval-augmented generation.
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
        """The session cache that it drafts from, if there is one."""
        sources = self.drafter.drafters if isinstance(self.drafter, Blend) else [self.drafter]
        return next((each for each in sources if isinstance(each, RetrievalCache)), None)


def transformers_methods() -> list[Method]:
    """Plain decoding, and transformers' prompt look-up."""
    options = {"prompt_lookup_num_tokens": LOOK_UP_TOKENS}
    return [Method(PLAIN), Method(LOOK_UP, LOOK_UP_TOKENS, options=options)]


def static_options(length: int, device: str) -> dict[str, Any]:
    """The arguments of `generate` for compiled passes over a cache of one length, so that no text
    has them compiled anew."""
    static: dict[str, Any] = {"cache_implementation": "static", "max_cache_len": length}
    if device == "cpu":  # where `generate` compiles only if it is told to
        config: Any = CompileConfig(mode="default")
        config._compile_all_devices = True
        static["compile_config"] = config
    return static


def compiled_methods(static: dict[str, Any], nodes: Sequence[int | str]) -> list[Method]:
    """Compiled and reproducible decoding, plain and drafted.

    Args:
        static (`dict`): See [`static_options`].
        nodes (sequence of `int` or `"auto"`): The draft budgets.
    """
    reproducible = {**static, "verification": REPRODUCIBLE}
    return [
        Method(f"{PLAIN}, {COMPILED}", options=static),
        *(Method(f"{DEFAULT}, {COMPILED}", each, _default(), static) for each in nodes),
        Method(f"{PLAIN}, {REPRODUCIBLE}", options=reproducible),
        Method(f"{DEFAULT}, {REPRODUCIBLE}", "auto", _default(), reproducible),
    ]


def _default() -> Drafter:
    return ReferenceCopy() | TokenRecycling()


def decoding_methods(
    store: Datastore | None = None,
    recycles: bool = True,
    nodes: Sequence[int | str] = BUDGETS,
    table: TokenRecycling | None = None,
) -> list[Method]:
    """All methods without retrieval, plain decoding first.

    Each has its own new drafters, so that no cache holds an answer that another method returned.

    Args:
        store ([`Datastore`], *optional*): A datastore to draft from as well.
        recycles (`bool`, *optional*, defaults to `True`): Whether the model's logits say anything
            of its text. In a replay they do not: it is forced.
        nodes (sequence of `int` or `"auto"`, *optional*): The draft budgets of `ReferenceCopy` and
            of the blends.
        table ([`TokenRecycling`], *optional*): One that was built or loaded, to begin with as well.
    """
    chain = {"verification": "chain"}
    methods = [
        *transformers_methods(),
        Method("LLMA's algorithm", 18, ReferenceCopy(mode="llma", copy_length=18), chain),
        *(Method("ReferenceCopy", each, ReferenceCopy()) for each in nodes),
        Method("RetrievalCache", "auto", RetrievalCache()),
    ]
    if recycles:
        fixed = [each for each in nodes if each != "auto"]
        methods += [
            *(Method(RECYCLING, each, TokenRecycling(mode="published")) for each in fixed),
            Method("TokenRecycling", "auto", TokenRecycling()),
            *(Method(DEFAULT, each, ReferenceCopy() | TokenRecycling()) for each in nodes),
        ]
    if table is not None:
        methods += (
            Method(f"{DEFAULT}, with a table", each, ReferenceCopy() | copy.deepcopy(table))
            for each in nodes
        )
    if store is not None:
        if store.form == "full":
            methods.append(Method("REST's algorithm", 64, DatastoreDrafts(store, mode="rest")))
        methods.append(Method("DatastoreDrafts", "auto", DatastoreDrafts(store)))
    return [*methods, *(Method(BLEND, each, _blend(store, recycles)) for each in nodes)]


def _blend(store: Datastore | None, recycles: bool) -> Drafter:
    blend = ReferenceCopy() | RetrievalCache()
    if recycles:
        blend = blend | TokenRecycling()
    return blend if store is None else blend | DatastoreDrafts(store)


def recycling_settings() -> dict[str, dict[str, Method]]:
    """[`TokenRecycling`] beside [`ReferenceCopy`], with one of its options changed at a time: the
    option, its values, and a method for each. `"nodes"` has the defaults."""

    def method(name: str, nodes: int, recycling: TokenRecycling) -> Method:
        return Method(name, nodes, ReferenceCopy() | recycling)

    without = TokenRecycling()
    without.prompt_fraction = 0.0
    sizes = (1 << 8, 1 << 10, 1 << 12, 1 << 14)
    drafters: dict[str, dict[Any, TokenRecycling]] = {
        "context": {n: TokenRecycling(context=n) for n in (1, 2)},
        "top_k": {k: TokenRecycling(top_k=k) for k in (1, 2, 4, 16)},
        "max_contexts": {size: TokenRecycling(max_contexts=size) for size in sizes},
        "prompt's logits": {"without": without},
    }
    name, most = DEFAULTS
    nodes = {str(n): method(name, n, TokenRecycling()) for n in (4, 8, 16, 32, most)}
    return {"nodes": nodes} | {
        option: {
            str(value): method(f"{option} {value}", most, recycling)
            for value, recycling in values.items()
        }
        for option, values in drafters.items()
    }


def speculations(ablate: bool) -> dict[str, Speculation | None]:
    """The settings of speculative retrieval, by name.

    Args:
        ablate (`bool`): Beside the main ones also RaLMSpec without some of its boosters (arXiv
            2401.14021, Tables 1 and 4), and ours with fixed strides instead of OS3.
    """
    main = {BASELINE: None, PUBLISHED: Speculation.published("psa"), OURS: Speculation()}
    if not ablate:
        return main
    letters = ("", "p", "s", "a", "ps", "pa", "sa")
    strides = range(1, 9)
    return {
        **main,
        **{f"as published, {each or 'none'}": Speculation.published(each) for each in letters},
        **{f"stride {each}, asynchronous": Speculation(stride=each) for each in strides},
        "ours, ps": Speculation(asynchronous=False),
        **{f"stride {each}": Speculation(stride=each, asynchronous=False) for each in strides},
    }


def retrieving_methods(settings: dict[str, Speculation | None], **options: Any) -> list[Method]:
    """A method for each setting of speculation, with further keyword arguments of `generate`."""
    return [
        Method(name, options={**options, "speculation": speculation}, retrieves=True)
        for name, speculation in settings.items()
    ]
