"""The entry point of `generate(candidate_generator=...)`.

[`speculate`] returns what `generate` would have returned without drafts, see `loop.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import BaseStreamer, CandidateGenerator, GenerateDecoderOnlyOutput

from ..drafting.calls import LateDrafter, remember_outputs
from ..drafting.candidates import CandidateChain
from ..drafting.contract import Drafter
from ..refusals import (
    Reason,
    RefusedCallError,
    check_options,
    check_reproducible,
    why_plain,
    why_undrafted,
)
from ..transformers_names import belongs_to_caller, decoder_output, is_synced
from ..verification.choice import Choice, select_verifier
from ..verification.random_state import random_numbers
from ..verification.ranks import Ranks, kept_in_step
from ..verification.verifier import REPRODUCIBLE, Verifier
from .accept import is_blind
from .batch import BatchCriteria, rows_of
from .column_noise import ColumnNoise
from .loop import Loop
from .plain import decode_plainly, log_plain
from .request import Request
from .row import Row, longest_row, own_length, padded_ids

Output: TypeAlias = GenerateDecoderOnlyOutput | torch.Tensor


@torch.no_grad()
def speculate(  # noqa: D417
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    candidate_generator: Drafter | CandidateGenerator | Literal["auto"] | None = "auto",
    max_draft_tokens: int | Literal["auto"] | None = "auto",
    verification: str = "auto",
    streamer: BaseStreamer | None = None,
    synced_gpus: bool | None = None,
    adds_cache: bool = False,
    **model_kwargs: Any,
) -> Output:
    """Speculative decoding for `model.generate(..., custom_generate=hf_refspec.speculate)`.

    `model.generate(..., candidate_generator=drafter)` also calls this. `generate` prepares all
    arguments but these:

    Args:
        candidate_generator ([`Drafter`], [`Datastore`], `CandidateGenerator` or `"auto"`,
            *optional*, defaults to `"auto"`): The drafter. A datastore stands for
            `DatastoreDrafts(store)`; a transformers `CandidateGenerator` is verified as a chain.
            `"auto"`, or `None`, is `ReferenceCopy() | TokenRecycling()`, whose table is stored on
            the model between calls, and `SiblingCopy()` for rows of one prompt. With
            `verification="reproducible"`, `None` drafts nothing.
        max_draft_tokens (`int` or `"auto"`, *optional*, defaults to `"auto"`): The most draft nodes
            in one forward pass (of each row), 0 for plain decoding, 1,024 at most: from there on a
            pass takes time in proportion to its tokens on any device. `"auto"`, or `None`, verifies
            those that pay for themselves, see [`~generation.plan.AutoBudget`]; a
            `CandidateGenerator` sets its own length.
        verification (`str`, *optional*, defaults to `"auto"`): `"tree"` verifies all branches of a
            draft, `"chain"` its best path. `"auto"` takes the tree where a probe of the model finds
            it exact, else the chain; where neither is exact it decodes plainly, with a warning.
            `"reproducible"` verifies chains by passes of one width in a static cache: ids, logits
            and scores are then the same bit by bit with any draft and without a
            `candidate_generator`, in bfloat16 and float16 too.
        adds_cache (`bool`, *optional*, defaults to `False`): Whether plain decoding would have no
            cache, because the model is configured to use none.

    Returns:
        What `generate` returns: ids `(rows, length)`, padded on the right where a row ends early,
        or a `GenerateDecoderOnlyOutput`.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an argument asks for what cannot be lossless, see the documentation's limits.
        RuntimeError: If another call is using this drafter.
    """
    max_draft_tokens = "auto" if max_draft_tokens is None else max_draft_tokens
    if candidate_generator is None and verification == REPRODUCIBLE.name:
        candidate_generator = Drafter()
        max_draft_tokens = 0
    check_options(max_draft_tokens, verification)
    request = Request(
        model=model,
        input_ids=input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        candidate_generator=candidate_generator,
        streamer=streamer,
        model_kwargs=model_kwargs,
        adds_cache=adds_cache,
    )
    named = verification != "auto"
    if isinstance(request.drafter, CandidateChain) and verification == "auto":
        verification = "chain"
    reason = why_plain(model, input_ids, logits_processor, model_kwargs)
    if verification == REPRODUCIBLE.name:
        check_reproducible(input_ids, generation_config, model_kwargs)
        if reason is not None:
            raise RefusedCallError(f"`verification={verification!r}` is impossible: {reason.text}.")
    ranks = Ranks.of(model)
    synced = is_synced(model, synced_gpus)
    with (
        kept_in_step(model, input_ids) if synced else nullcontext(),
        ranks.together(),
        request.drafters() as drafters,
    ):
        max_draft_tokens, verification = ranks.agree((max_draft_tokens, verification))
        options = _Options(max_draft_tokens, verification, ranks)
        if synced:
            generation_config.disable_compile = True  # a graph drops the hook of `kept_in_step`
        if generation_config.do_sample and not ranks.alone:
            numbers = random_numbers(input_ids.device)
            numbers.set_rng_state(ranks.agree(numbers.get_rng_state()))
        choice = Choice(None, reason)
        if reason is None:
            choice = select_verifier(
                model,
                verification,
                len(input_ids),
                generation_config,
                request.pass_kwargs,
                drafts=max_draft_tokens != 0 or adds_cache,
                probes_later=verification == "auto" and ranks.alone and not adds_cache,
                named=named,
                stats=drafters[0].stats,
            )
        if streamer is not None:
            streamer.put(input_ids.cpu())
        if choice.verifier is None:
            assert choice.reason is not None
            return decode_plainly(request, drafters, choice.reason)
        output = _decode(request, options, drafters, choice.verifier, choice.is_probed)
    if streamer is not None:
        streamer.end()
    return output


@dataclass(frozen=True)
class _Options:
    """How a call is drafted and verified, the same in all `ranks`."""

    max_draft_tokens: int | str
    verification: str
    ranks: Ranks


def _decode(
    request: Request,
    options: _Options,
    drafters: Sequence[Drafter],
    verifier: Verifier,
    is_probed: bool,
) -> Output:
    """Decodes with drafts until all rows have ended."""
    rows, criteria = rows_of(request, options.ranks)
    for row, drafter in zip(rows, drafters, strict=True):
        row.drafter = drafter
    stats = drafters[0].stats
    stats.verification = verifier.kind.name
    loop = Loop.over(
        verifier,
        drafters[0],
        stats,
        max_draft_tokens=options.max_draft_tokens,
        rows=len(rows),
        chains=options.verification == "chain",
        is_probed=is_probed,
        waits=True,
        ranks=options.ranks,
    )
    output = _run(loop, request, options.ranks, rows, criteria)
    pads = request.pads
    outputs = [row.output[: own_length(row, pads) - request.prompt_length] for row in rows]
    remember_outputs(stats, drafters, outputs)
    if not stats.drafted:
        reason = _why_undrafted(loop, drafters)
        stats.reason = reason.text
        if reason.kind == "probe":
            log_plain(request, reason)
    return output


def _run(
    loop: Loop, request: Request, ranks: Ranks, rows: list[Row], criteria: BatchCriteria | None
) -> Output:
    verifier = loop.verifier
    device = request.input_ids.device
    returns_dict = request.generation_config.return_dict_in_generate
    keeps_cache = bool(returns_dict or belongs_to_caller(verifier.entries.cache))
    pads = request.pads
    noise = None
    # Random numbers that are drawn ahead let all tokens of a pass be chosen at once; on the CPU
    # that would cost more than it saves.
    on_device = device.type != "cpu" and is_blind(request.logits_processor)
    if request.generation_config.do_sample and (len(rows) > 1 or on_device):
        noise = ColumnNoise(len(rows), device)
        for i, row in enumerate(rows):
            row.noise = partial(noise.of, i)
    try:
        loop.run(rows, pads, keeps_cache or not verifier.kind.drops_rows, criteria)
        ids = padded_ids(rows, longest_row(rows), pads, request.pad_id)
        ranks.agree(None)  # a rank that has failed could not run the last pass
        if keeps_cache:
            verifier.finish(ids, [own_length(row, pads) for row in rows])
        else:
            verifier.entries.release()
    except BaseException:  # a drafter, processor, criterion or streamer that cancels the call
        verifier.abandon()
        raise
    finally:
        if noise is not None:
            noise.end(longest_row(rows) - request.prompt_length)
    if not returns_dict:
        return ids
    return decoder_output(ids, verifier.entries.cache, rows[0].scores, rows[0].logits)


def _why_undrafted(loop: Loop, drafters: Sequence[Drafter]) -> Reason:
    """Why a call that could have verified drafts has verified none."""
    late = [isinstance(drafter, LateDrafter) and not drafter.begun for drafter in drafters]
    undrafted = why_undrafted(loop.budget.max_nodes, waited=all(late), offered=loop.offered)
    return undrafted if loop.limits.refused is None else loop.limits.refused
