"""The decoding loop: draft, verify, accept, commit.

[`speculate`] returns what `generate` would have returned without drafts. Greedy or sampled, each
token is chosen from the target model's own logits with the call's own logits processors, stopping
criteria and random numbers, in the order of plain decoding; a draft only decides how many tokens
one forward pass yields.
"""

from __future__ import annotations

import logging
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.candidate_generator import CandidateGenerator

from ..drafting.candidates import CandidateChain
from ..drafting.drafter import Drafter, checked_draft
from ..drafting.reference_copy import ReferenceCopy
from ..drafting.tree import DraftTree
from ..verification.positions import depth_limit
from ..verification.probe import select_verification
from ..verification.verifier import Verification
from .batch_loop import speculate_batch
from .budget import Budget, make_budget
from .row import TargetText
from .validation import check_batch, check_model, check_options, check_request

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

logger = logging.getLogger("hf_refspec")


@torch.no_grad()
def speculate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    candidate_generator: CandidateGenerator | None = None,
    max_draft_tokens: int | Literal["auto"] = "auto",
    verification: str = "auto",
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Speculative decoding for `model.generate(..., custom_generate=hf_refspec.speculate)`.

    `model.generate(..., candidate_generator=drafter)` comes here too. `generate` prepares all
    arguments but these:

    Args:
        candidate_generator ([`Drafter`] or `CandidateGenerator`, *optional*): What drafts; a
            transformers `CandidateGenerator` is verified as a chain. [`ReferenceCopy`] by default.
        max_draft_tokens (`int` or `"auto"`, *optional*, defaults to `"auto"`): The most draft nodes
            in one forward pass (of each row), 0 for plain decoding. `"auto"` verifies as many as
            pay for themselves, see [`~drafting.budget.AutoBudget`]; a `CandidateGenerator` decides
            itself.
        verification (`str`, *optional*, defaults to `"auto"`): `"tree"` verifies all branches of a
            draft, `"chain"` its best path. `"auto"` takes the tree where a probe of the model finds
            it exact, else the chain; where neither is exact it decodes plainly, with a warning.

    Returns:
        What `generate` returns: ids `(rows, length)`, or a `GenerateDecoderOnlyOutput`.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an argument asks for what cannot be lossless, see the README's limits.
        RuntimeError: If another call is using this drafter.
    """
    if candidate_generator is None:
        candidate_generator = ReferenceCopy()
    check_model(model)
    check_options(candidate_generator, max_draft_tokens, verification)
    check_request(input_ids, generation_config, model_kwargs)
    if not isinstance(candidate_generator, Drafter):
        candidate_generator = CandidateChain(candidate_generator)
        verification = "chain" if verification == "auto" else verification

    candidate_generator.prepare(model)
    if len(input_ids) > 1:
        check_batch(input_ids, generation_config, streamer)
        return speculate_batch(
            candidate_generator,
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            max_draft_tokens,
            verification,
            model_kwargs,
        )
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    prompt_ids = input_ids[0].numpy(force=True).astype(np.int64)
    with candidate_generator.session(prompt_ids, vocab_size):
        verifier = select_verification(
            model, verification, generation_config, model_kwargs, drafts=max_draft_tokens != 0
        )
        if streamer is not None:
            streamer.put(input_ids.cpu())
        if verifier is None:
            return _decode_plainly(
                candidate_generator,
                model,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                streamer=streamer,
                **model_kwargs,
            )
        text = TargetText(
            input_ids, logits_processor, stopping_criteria, generation_config, streamer
        )
        budget = make_budget(max_draft_tokens, candidate_generator, model, type(verifier).__name__)
        _decode(text, candidate_generator, verifier, budget, vocab_size)
    if streamer is not None:
        streamer.end()
    return _output(text, verifier, generation_config)


def _decode(
    text: TargetText, drafter: Drafter, verifier: Verification, budget: Budget, vocab_size: int
) -> None:
    """The loop. One pass yields the accepted draft tokens and one more, the target's own."""
    stats = drafter.stats
    began = perf_counter()
    logits = verifier.prefill(text.ids)  # (1, vocab_size)
    tokens = _accept(text, verifier, logits, DraftTree.empty())
    drafter.observe(tokens, logits)
    stats.record_pass(drafted=0, accepted=0)
    prefilled = committed = perf_counter()

    while not text.finished:
        draft = _draft(drafter, verifier, text, budget.most, vocab_size)
        [draft] = budget.trim([drafter], [draft], perf_counter() - committed)
        drafted = perf_counter()
        logits = verifier.verify(text.ids, draft)  # (1 + T, vocab_size)
        tokens = _accept(text, verifier, logits, draft)
        verified = perf_counter()
        verifier.commit(draft, text.path)
        budget.record([tokens], 1 + len(draft), verified - drafted)
        drafter.observe(tokens, logits)

        stats.record_pass(drafted=len(draft), accepted=len(text.path))
        stats.drafting_seconds += drafted - committed
        stats.verifying_seconds += verified - drafted
        committed = perf_counter()
        stats.other_seconds += committed - verified
    stats.prefill_seconds = prefilled - began


def _draft(
    drafter: Drafter, verifier: Verification, text: TargetText, budget: int, vocab_size: int
) -> DraftTree:
    if budget == 0 or verifier.restarted:
        return DraftTree.empty()
    config = verifier.model.config.get_text_config(decoder=True)
    deepest = depth_limit(config, verifier.last_position, len(text), text.max_length)
    if deepest <= 0:
        return DraftTree.empty()
    draft = checked_draft(drafter, budget, vocab_size, chain=not verifier.takes_trees)
    return draft.truncated(deepest)


def _accept(
    text: TargetText, verifier: Verification, logits: torch.Tensor, draft: DraftTree
) -> np.ndarray:
    try:
        return np.array(text.accept(logits, draft))
    except BaseException:  # a streamer, processor or criterion that cancels the call
        verifier.abandon(draft, text.path)
        raise


def _output(
    text: TargetText, verifier: Verification, generation_config: GenerationConfig
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """What `GenerationMixin._sample` returns."""
    returned = generation_config.return_dict_in_generate
    if returned or getattr(verifier.cache, "_is_user_defined", False):
        verifier.finish(text.ids)
    if not returned:
        return text.ids
    return GenerateDecoderOnlyOutput(
        sequences=text.ids,
        scores=text.scores,
        logits=text.logits,
        past_key_values=verifier.cache,
    )


def _decode_plainly(
    drafter: Drafter, model: PreTrainedModel, input_ids: torch.Tensor, **kwargs: Any
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    logger.warning(
        "%s gives other logits for several tokens in one pass than for one after another, so that "
        "no draft can be verified: decoding plainly, with the same result and no speed-up.",
        type(model).__name__,
    )
    output = type(model)._sample(model, input_ids, **kwargs)
    ids = output if isinstance(output, torch.Tensor) else output.sequences
    new_ids = ids[0, input_ids.shape[1] :].numpy(force=True).astype(np.int64)
    for token in new_ids:
        drafter.stats.record_pass(drafted=0, accepted=0)
        drafter.observe(token[None])
    return output
