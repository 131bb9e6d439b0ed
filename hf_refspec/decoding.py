"""The decoding loop: draft, verify, accept, commit.

[`speculate`] returns what `generate` would have returned without drafts. Greedy or sampled, each
token is chosen from the target model's own logits with the call's own logits processors, stopping
criteria and random numbers, in the order of plain decoding; a draft only decides how many tokens
one forward pass yields.
"""

from __future__ import annotations

import logging
from time import perf_counter
from typing import TYPE_CHECKING, Any

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

from .acceptance import TargetText
from .drafting.candidates import CandidateChain
from .drafting.drafter import Drafter
from .drafting.reference_copy import ReferenceCopy
from .drafting.tree import DraftTree
from .positions import furthest_position
from .probe import select_verification
from .validation import check_model, check_options, check_request
from .verification import Verification

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
    max_draft_tokens: int | None = None,
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
        max_draft_tokens (`int`, *optional*): The most draft nodes in one forward pass, 0 for plain
            decoding. By default 8 on a CPU and 32 elsewhere, where more tokens in a pass cost
            little; a `CandidateGenerator`'s own length.
        verification (`str`, *optional*, defaults to `"auto"`): `"tree"` verifies all branches of a
            draft, `"chain"` its best path. `"auto"` takes the tree where a probe of the model finds
            it exact, else the chain; where neither is exact it decodes plainly, with a warning.

    Returns:
        What `generate` returns: ids `(1, length)`, or a `GenerateDecoderOnlyOutput`.

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
    if max_draft_tokens is None:
        max_draft_tokens = candidate_generator.default_budget(model.device)

    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    prompt_ids = input_ids[0].numpy(force=True).astype(np.int64)
    with candidate_generator.session(prompt_ids, vocab_size):
        verifier = select_verification(
            model, verification, generation_config, model_kwargs, drafts=max_draft_tokens > 0
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
        _decode(text, candidate_generator, verifier, max_draft_tokens, vocab_size)
    if streamer is not None:
        streamer.end()
    return _output(text, verifier, generation_config)


def _decode(
    text: TargetText, drafter: Drafter, verifier: Verification, budget: int, vocab_size: int
) -> None:
    """The loop. One pass yields the accepted draft tokens and one more, the target's own."""
    stats = drafter.stats
    began = perf_counter()
    logits = verifier.prefill(text.ids)  # (1, vocab_size)
    tokens = _accept(text, verifier, logits, DraftTree.empty())
    drafter.observe(np.array(tokens), logits)
    stats.record_pass(drafted=0, accepted=0)
    prefilled = committed = perf_counter()

    while not text.finished:
        draft = _draft(drafter, verifier, budget, _depth_limit(text, verifier), vocab_size)
        drafted = perf_counter()
        logits = verifier.verify(text.ids, draft)  # (1 + T, vocab_size)
        tokens = _accept(text, verifier, logits, draft)
        verified = perf_counter()
        verifier.commit(draft, text.path)
        drafter.observe(np.array(tokens), logits)

        stats.record_pass(drafted=len(draft), accepted=len(text.path))
        stats.drafting_seconds += drafted - committed
        stats.verifying_seconds += verified - drafted
        committed = perf_counter()
        stats.other_seconds += committed - verified
    stats.prefill_seconds = prefilled - began


def _draft(
    drafter: Drafter, verifier: Verification, budget: int, depth_limit: int, vocab_size: int
) -> DraftTree:
    if budget == 0 or depth_limit <= 0 or verifier.restarted:
        return DraftTree.empty()
    draft = drafter.draft(budget) if verifier.takes_trees else drafter.draft_chain(budget)
    if not isinstance(draft, DraftTree) or len(draft) > budget:
        raise ValueError(
            f"{type(drafter).__name__} was asked for a DraftTree of at most {budget} nodes, but "
            f"drafted {len(draft) if isinstance(draft, DraftTree) else draft!r}."
        )
    draft.check(vocab_size)
    return draft.truncated(depth_limit)


def _accept(
    text: TargetText, verifier: Verification, logits: torch.Tensor, draft: DraftTree
) -> list[int]:
    try:
        return text.accept(logits, draft)
    except BaseException:  # a streamer, processor or criterion that cancels the call
        verifier.abandon(draft, text.path)
        raise


def _depth_limit(text: TargetText, verifier: Verification) -> int:
    """How deep a draft may go: not past `max_length`, where one token is the target's own, nor to
    positions where plain decoding would be another computation."""
    limits = [np.iinfo(np.int32).max]
    if text.max_length is not None:
        limits.append(text.max_length - len(text) - 1)
    config = verifier.model.config.get_text_config(decoder=True)
    furthest = furthest_position(config, verifier.last_position)
    if furthest is not None:
        limits.append(furthest - verifier.last_position)
    return min(limits)


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
    for _ in range(ids.shape[1] - input_ids.shape[1]):
        drafter.stats.record_pass(drafted=0, accepted=0)
    return output
