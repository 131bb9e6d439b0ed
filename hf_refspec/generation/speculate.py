"""The entry point of `generate(candidate_generator=...)`.

[`speculate`] returns what `generate` would have returned without drafts, see `loop.py`. Where
drafts could change that, transformers itself decodes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeAlias

import numpy as np
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
from ..drafting.contract import Drafter, Observation
from ..refusals import (
    Reason,
    RefusedCallError,
    check_options,
    check_reproducible,
    why_plain,
    why_undrafted,
)
from ..transformers_names import (
    CACHE_NAMES,
    belongs_to_caller,
    decoder_output,
    ends_and_padding,
    is_synced,
    transformers_loop,
)
from ..verification.passes import random_numbers
from ..verification.probe import Choice, select_verifier
from ..verification.ranks import Ranks, kept_in_step
from ..verification.verifier import REPRODUCIBLE, Verifier
from .accept import is_blind
from .budget import make_budget
from .loop import Loop
from .plan import DraftLimits
from .request import Request, rows_of
from .row import ColumnNoise, longest_row, own_length, padded_ids

logger = logging.getLogger("hf_refspec")

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
    tokenizer: Any = None,
    adds_cache: bool = False,
    reading: Mapping[str, Any] | None = None,
    **model_kwargs: Any,
) -> Output:
    """Speculative decoding for `model.generate(..., custom_generate=hf_refspec.speculate)`.

    `model.generate(..., candidate_generator=drafter)` also calls this. `generate` prepares all
    arguments but these:

    Args:
        candidate_generator ([`Drafter`], [`Datastore`], `CandidateGenerator` or `"auto"`,
            *optional*, defaults to `"auto"`): The drafter. A datastore drafts as
            `DatastoreDrafts(store)`; a transformers `CandidateGenerator` is verified as a chain.
            `"auto"`, or `None`, is `ReferenceCopy() | TokenRecycling()`, whose table is stored on
            the model between calls, and `SiblingCopy()` for rows of one prompt. With
            `verification="reproducible"`, `None` drafts nothing.
        max_draft_tokens (`int` or `"auto"`, *optional*, defaults to `"auto"`): The most draft nodes
            in one forward pass (of each row), 0 for plain decoding, 1,024 at most: with more a
            pass takes time in proportion to its tokens on any device. `"auto"`, or `None`, verifies
            the nodes that pay for themselves, see [`~generation.budget.AutoBudget`]; a
            `CandidateGenerator` sets its own length.
        verification (`str`, *optional*, defaults to `"auto"`): `"tree"` verifies all branches of a
            draft, `"chain"` its best path. `"auto"` takes the tree where a probe of the model finds
            it exact, else the chain; where neither is exact it decodes plainly, with a warning.
            `"reproducible"` verifies chains by passes of one width in a static cache: ids, logits
            and scores are then the same bit by bit with any draft and without a
            `candidate_generator`, in bfloat16 and float16 too.
        tokenizer (*optional*): Writes the text that `stats` shows in a notebook.
        adds_cache (`bool`, *optional*, defaults to `False`): True if plain decoding would have no
            cache, because the model is configured to use none.

    Returns:
        The output of `generate`: ids `(rows, length)`, padded on the right where a row ends early,
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
        reading=reading or {},
        tokenizer=tokenizer,
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
            return _decode_plainly(request, drafters, choice.reason)
        output = _decode(
            request,
            drafters,
            choice.verifier,
            ranks,
            max_draft_tokens=max_draft_tokens,
            chains=verification == "chain",
            is_probed=choice.is_probed,
        )
    if streamer is not None:
        streamer.end()
    return output


def _decode(
    request: Request,
    drafters: Sequence[Drafter],
    verifier: Verifier,
    ranks: Ranks,
    *,
    max_draft_tokens: int | str,
    chains: bool,
    is_probed: bool,
) -> Output:
    """Decodes with drafts until all rows have ended."""
    device = request.input_ids.device
    count = len(request.input_ids)
    # Random numbers that are drawn ahead let all tokens of a pass be chosen at once; on the CPU
    # that would cost more than it saves.
    on_device = device.type != "cpu" and is_blind(request.logits_processor)
    samples = request.generation_config.do_sample and (count > 1 or on_device)
    noise = ColumnNoise(count, device) if samples else None
    rows, criteria = rows_of(request, drafters, ranks, noise)
    stats = drafters[0].stats
    stats.explain(verifier.kind.name)
    budget = make_budget(max_draft_tokens, drafters[0], verifier, waits=True)
    limits = DraftLimits(verifier, stats, count, chains, is_probed, ranks)
    loop = Loop(verifier, budget, limits, stats)
    prompt_length = request.input_ids.shape[1]
    config = request.generation_config
    returns_dict = config.return_dict_in_generate
    keeps_cache = bool(returns_dict or belongs_to_caller(verifier.entries.cache))
    pads = request.pads
    try:
        loop.run(rows, pads, keeps_cache or bool(verifier.kind.widths), criteria)
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
            noise.end(longest_row(rows) - prompt_length)
    outputs = [row.output[: own_length(row, pads) - prompt_length] for row in rows]
    remember_outputs(stats, drafters, outputs, request.tokenizer)
    if not stats.drafted:
        late = [isinstance(drafter, LateDrafter) and not drafter.begun for drafter in drafters]
        reason = limits.exactness.refused or why_undrafted(
            max_draft_tokens, waited=all(late), offered=loop.offered
        )
        stats.explain(verifier.kind.name, reason.text)
        if reason.kind == "probe":
            _log_plain(request, reason)
    elif limits.exactness.refused is not None:
        stats.explain(verifier.kind.name, limits.exactness.refused.text)
    if not returns_dict:
        return ids
    return decoder_output(ids, verifier.entries.cache, rows[0].scores, rows[0].logits)


def _log_plain(request: Request, reason: Reason) -> None:
    """Warns that a call decodes plainly."""
    name = type(request.model).__name__
    logger.warning("%s decodes plainly, with the same text and no speed-up: %s.", name, reason.text)


def _decode_plainly(request: Request, drafters: Sequence[Drafter], reason: Reason) -> Output:
    """Plain decoding by transformers itself; the drafters observe its tokens."""
    _log_plain(request, reason)
    stats = drafters[0].stats
    stats.explain("none", reason.text)
    kwargs = request.model_kwargs
    if request.adds_cache:
        request.generation_config.use_cache = False
        others = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}
        kwargs = {**others, "use_cache": False}
    output = transformers_loop(
        request.model,
        request.input_ids,
        logits_processor=request.logits_processor,
        stopping_criteria=request.stopping_criteria,
        generation_config=request.generation_config,
        streamer=request.streamer,
        **kwargs,
    )
    ids = output if isinstance(output, torch.Tensor) else output.sequences
    new_ids = ids[:, request.input_ids.shape[1] :].numpy(force=True).astype(np.int64)
    emitted = [_without_padding(row, request) for row in new_ids]
    for column in range(new_ids.shape[1]):
        stats.record_rows([(0, 0) for tokens in emitted if column < len(tokens)])
    remember_outputs(stats, drafters, [tokens.tolist() for tokens in emitted])
    for drafter, tokens in zip(drafters, emitted, strict=True):
        for token in tokens:
            drafter.observe(Observation(token[None]))
    return output


def _without_padding(new_ids: np.ndarray, request: Request) -> np.ndarray:
    """The new ids of a row, without padding if it ended early."""
    eos, pad = ends_and_padding(request.generation_config)
    if len(request.input_ids) == 1 or eos is None or pad is None:
        return new_ids
    ends = np.flatnonzero(np.isin(new_ids, eos.numpy(force=True)))
    if len(ends):
        return new_ids[: ends[0] + 1]
    return new_ids[: np.flatnonzero(new_ids != int(pad)).max(initial=-1) + 1]  # another criterion
