"""Which verifier a call gets: the best one that the model itself has been found exact with.

What a probe has found is kept at the model for as long as nothing that can change its logits has
changed, see `model_memo.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import Cache, GenerationConfig, PreTrainedModel, StaticCache

from ..drafting.stats import DraftStats
from ..refusals import Reason, RefusedCallError, why_inexact, why_unverifiable
from ..text_config import attends_locally, text_config
from ..transformers_names import USUAL_ARGUMENTS, takes_usual_steps
from .caches import call_device, find_cache, has_padding
from .model_memo import memo_of_state
from .probe import Finding, ProbedCall, probe
from .ranks import Ranks
from .verifier import CHAIN, RECURRENT, REPRODUCIBLE, STATIC, TREE, Kind, Verifier


@dataclass(frozen=True)
class Choice:
    """How a call is verified."""

    verifier: Verifier | None  # `None` where drafts cannot be verified exactly: decode plainly
    reason: Reason | None = None  # why there is none
    is_probed: bool = True  # whether it has been found exact; until then nothing may be drafted


def select_verifier(
    model: PreTrainedModel,
    requested: str,
    rows: int,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    drafts: bool = True,
    probes_later: bool = False,
    named: bool = False,
    stats: DraftStats | None = None,
) -> Choice:
    """The first kind of verifier that suits this call's rows and cache and that the probe finds
    exact.

    `requested` is `"auto"`, or `"tree"`, `"chain"` or `"reproducible"` to allow only that. Without
    `drafts` a single row without padding takes the steps of plain decoding, and is not probed. With
    `probes_later` the tree of a model that takes the usual steps is probed after the first token,
    by [`~draft_limits.DraftLimits`]. `stats` count the passes of probes.

    Raises:
        RefusedCallError: If there is none and the call has `named` what is requested; else it
            decodes plainly.
    """
    trusts_code = named and requested != REPRODUCIBLE.name
    reason = why_unverifiable(model, rows, model_kwargs, requested, trusts_code)
    if reason is not None:
        if named:
            raise RefusedCallError(f"`verification={requested!r}` is impossible: {reason.text}.")
        return Choice(None, reason)
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
            and takes_usual_steps(model)
        )
        can_wait = (
            probes_later
            and kind is TREE
            and model_kwargs.keys() <= USUAL_ARGUMENTS
            # Its windows are probed at once, lest chains are tried in the next call only.
            and not attends_locally(text_config(model))
            and _key(call) not in memo_of_state(model)
        )
        if takes_plain_steps and (not drafts or can_wait):
            return Choice(Verifier(kind, model, generation_config, model_kwargs), is_probed=False)
        finding = known_finding(call, stats)
        if finding.exact:
            return Choice(Verifier(kind, model, generation_config, model_kwargs))
        findings[kind] = finding
    by_name = {kind.name: finding for kind, finding in findings.items()}
    reason = why_inexact(by_name, rows, find_cache(model_kwargs))
    if named:
        several = f" with {rows} rows" if rows > 1 else ""
        raise RefusedCallError(
            f"`verification={requested!r}` is not exact on {type(model).__name__}{several} with "
            f"this cache and attention implementation ({reason.text}). Pass `verification='auto'` "
            "to let the model decide."
        )
    return Choice(None, reason)


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


def known_finding(call: ProbedCall, stats: DraftStats | None = None) -> Finding:
    """Whether verified drafts have the logits of plain decoding; the model as it is now is probed
    once, in passes that `stats` count."""
    model = call.model
    key = _key(call)
    known: Finding | None = Ranks.of(model).agree(memo_of_state(model).get(key))
    if known is None:
        known = probe(call)
        if stats is not None:
            stats.probe_passes += known.passes
    if not known.lacked_memory:
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
