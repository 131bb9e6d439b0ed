"""Which verifier a call gets: the best one that the model itself has been found exact with.

What a probe has found is kept at the model for as long as nothing that can change its logits has
changed, see `model_memo.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import Cache, GenerationConfig, PreTrainedModel, StaticCache

from ..drafting.stats import DraftStats
from ..text_config import attends_locally, text_config
from ..transformers_names import (
    USUAL_ARGUMENTS,
    experts_implementation,
    has_compiled_forward,
    takes_usual_steps,
)
from .adapters import why_adapters_forbid_drafts
from .caches import call_device, crosses_images, find_cache, has_padding
from .model_memo import memo_of_state
from .probe import Finding, ProbedCall, probe
from .ranks import Ranks
from .verifier import CHAIN, RECURRENT, REPRODUCIBLE, STATIC, TREE, Kind, Verifier

_COMPILED = (
    "`torch.compile` was given its forward pass or some of its modules, and drafts would compile "
    "many more graphs: call `model.compile()` without `fullgraph`, or leave it uncompiled"
)
_CHECKPOINTING = (
    "gradient checkpointing is at work, which drops the cache: call "
    "`model.gradient_checkpointing_disable()` or `model.eval()`"
)
_IMAGES = "some of its layers attend to images alone, which probes do not have"


class RefusedCallError(ValueError):
    """A call that cannot be lossless with drafts; nothing has been done yet."""


@dataclass(frozen=True)
class Choice:
    """How a call is verified."""

    verifier: Verifier | None  # `None` where drafts cannot be verified exactly: decode plainly
    why: str = ""  # why that is so
    is_probed: bool = True  # whether it has been found exact; until then nothing may be drafted


def select_verifier(
    model: PreTrainedModel,
    requested: str,
    rows: int,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    drafts: bool = True,
    probes_later: bool = False,
    stats: DraftStats | None = None,
) -> Choice:
    """The first kind of verifier that suits this call's rows and cache and that the probe finds
    exact.

    `requested` is `"auto"`, or `"tree"`, `"chain"` or `"reproducible"` to allow only that. Without
    `drafts` a single row without padding takes the steps of plain decoding, and is not probed. With
    `probes_later` the tree of a model that takes the usual steps, no part of it in training mode,
    is probed after the first token, by [`~draft_limits.DraftLimits`]. `stats` count the
    passes of probes.
    """
    findings: dict[Kind, Finding] = {}
    for kind in _candidates(requested, rows, find_cache(model_kwargs)):
        if not kind.supports(model, model_kwargs):
            continue
        # Compiled passes may round to other bits, so that the call's own are compared.
        config = generation_config if kind.is_reproducible else None
        call = ProbedCall(kind, model, rows, model_kwargs, config=config)
        takes_plain_steps = (
            rows == 1
            and not kind.widths
            and not has_padding(model_kwargs)
            and _why_unverifiable(call) is None
        )
        can_wait = (
            probes_later
            and kind is TREE
            and model_kwargs.keys() <= USUAL_ARGUMENTS
            and takes_usual_steps(model)
            # A model may apply windows in its own manner (Dory): chains are then tried in this
            # call.
            and not attends_locally(text_config(model))
            and _key(call) not in memo_of_state(model)
            # Dropout uses up random numbers in a processor's own passes too, which a call that
            # begins anew does not repeat.
            and not any(module.training for module in model.modules())
        )
        if takes_plain_steps and (not drafts or can_wait):
            return Choice(Verifier(kind, model, generation_config, model_kwargs), is_probed=False)
        finding = known_finding(call, stats)
        if finding.exact:
            return Choice(Verifier(kind, model, generation_config, model_kwargs))
        findings[kind] = finding
    why = _why_plain(findings, rows, find_cache(model_kwargs))
    if requested != "auto":
        several = f" with {rows} rows" if rows > 1 else ""
        raise RefusedCallError(
            f"`verification={requested!r}` is not exact on {type(model).__name__}{several} with "
            f"this cache and attention implementation ({why}). Pass `verification='auto'` to let "
            "the model decide."
        )
    return Choice(None, why)


def _candidates(requested: str, rows: int, cache: Cache | None) -> Sequence[Kind]:
    """The kinds of verifiers that may be tried, the best first. In a static cache, and with several
    rows, a chain is verified as a tree."""
    if requested == REPRODUCIBLE.name:
        return (REPRODUCIBLE,)
    if isinstance(cache, StaticCache):
        return (STATIC,)
    if rows > 1:
        return (TREE,)
    kinds = {"auto": (TREE, CHAIN, RECURRENT), "tree": (TREE,), "chain": (CHAIN, RECURRENT)}
    return kinds[requested]


def _why_plain(findings: dict[Kind, Finding], rows: int, cache: Cache | None) -> str:
    """Why a call decodes plainly, by what the probe has found of each verifier, and what to do."""
    failures = {finding.failure for finding in findings.values()}
    if len(failures) == 1 and (failure := failures.pop()) is not None:
        return failure
    if findings:
        found = "; ".join(f"{kind.name}: {finding}" for kind, finding in findings.items())
        return f"several tokens in one pass have other logits than one after another ({found})"
    if cache is None:
        return "it keeps its cache in a form of its own, which drafts cannot be taken out of"
    if isinstance(cache, StaticCache):
        return "no verifier supports the layers of its static cache: pass a `DynamicCache`"
    if rows > 1:
        return (
            f"its attention or cache does not let {rows} rows be verified together: pass one "
            "prompt at a time"
        )
    return f"no verifier supports its {type(cache).__name__}"


def known_finding(call: ProbedCall, stats: DraftStats | None = None) -> Finding:
    """Whether verified drafts have the logits of plain decoding; the model as it is now is probed
    once, in passes that `stats` count."""
    model = call.model
    if (failure := _why_unverifiable(call)) is not None:
        return Finding(False, failure=failure)
    if call.kind.is_reproducible and _routes_by_token(model):
        failure = (
            "drafts change how many tokens each of its experts runs over; load it with "
            '`experts_implementation="batched_mm"`'
        )
        return Finding(False, failure=failure)
    key = _key(call)
    known: Finding | None = Ranks.of(model).agree(memo_of_state(model).get(key))
    if known is None:
        known = probe(call)
        if stats is not None:
            stats.probe_passes += known.passes
    memo_of_state(model)[key] = known  # the probe has shown what belongs to the state
    return known


def _key(call: ProbedCall) -> tuple[Any, ...]:
    """All that a finding depends on, apart from the state of the model."""
    kwargs = call.model_kwargs
    config = call.config
    return (
        "exact",
        call.kind,
        min(call.rows, 2),
        call.rows > 1 or has_padding(kwargs),
        kwargs.get("token_type_ids") is not None,
        kwargs.keys() <= USUAL_ARGUMENTS,  # others do not let rows be packed
        call_device(call.model, kwargs),
        call.boundary,
        "" if config is None or config.disable_compile else repr(config.compile_config),
    )


def _why_unverifiable(call: ProbedCall) -> str | None:
    """Why no drafts can be verified in the model's present state, or what no probe would show. With
    gradient checkpointing its layers run without the cache."""
    model = call.model
    if has_compiled_forward(model):
        return _COMPILED
    checkpoints = (getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if model.training and any(checkpoints):
        return _CHECKPOINTING
    if crosses_images(text_config(model), call.model_kwargs):
        return _IMAGES
    return why_adapters_forbid_drafts(model, call.rows)


def _routes_by_token(model: PreTrainedModel) -> bool:
    """Whether tokens choose among experts, so that shapes depend on what other tokens choose. Few
    texts show it: where no expert gets more tokens than without a draft, the bits are the same."""
    config = text_config(model)
    counts = (value for name, value in vars(config).items() if "expert" in name)
    mixture = any(isinstance(value, int) and value > 1 for value in counts)
    return mixture and experts_implementation(config) != "batched_mm"
