"""The decoding loop for several rows at once: batches, and several sequences of one prompt.

The same as in `decoding.py`, a row at a time in all but the forward pass: each row has its own
text, logits processors, stopping criteria and drafter, accepts as many tokens as the target model
agrees with, and stands wherever that has brought it. Greedy ids are those of plain batched
`generate`. Sampled tokens come from the same distributions, but the random numbers go to other rows
than there, since rows do not advance together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput

from ..drafting.drafter import Drafter, checked_draft
from ..drafting.tree import DraftTree
from ..verification.batch import BatchVerification
from ..verification.positions import depth_limit
from ..verification.probe import check_batches
from .batch_acceptance import BatchAcceptance
from .budget import Budget, make_budget
from .processors import criteria_of_rows, processors_of_rows
from .row import TargetText


@dataclass
class Row:
    """One text of the batch.

    Attributes:
        text ([`TargetText`]): Its prompt, padded as it came, and what was emitted.
        drafter ([`Drafter`]): Drafts for it alone.
        new_tokens (`np.ndarray`, int64 of shape `(m,)`): What the last forward pass gave it.
        stopped_at (`int`, *optional*): Its length when a stopping criterion first stopped it.
    """

    text: TargetText
    drafter: Drafter
    new_tokens: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    stopped_at: int | None = None


def speculate_batch(
    drafter: Drafter,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    max_draft_tokens: int | str,
    verification: str,
    model_kwargs: dict[str, Any],
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """[`speculate`] for `input_ids` with several rows; `max_draft_tokens` are those of a row.

    Returns:
        What `generate` returns: ids `(rows, length)`, padded on the right where a row ends early,
        or a `GenerateDecoderOnlyOutput`.

    Raises:
        ValueError: If the model cannot verify rows of different lengths, or a logits processor or
            stopping criterion cannot be asked about a row alone.
        RuntimeError: If another call is using this drafter.
    """
    count = len(input_ids)
    check_batches(model, count, model_kwargs)
    processors = processors_of_rows(logits_processor, count)
    criteria = criteria_of_rows(stopping_criteria, count)
    texts = [
        TargetText(input_ids[i : i + 1], processors[i], criteria[i], generation_config)
        for i in range(count)
    ]
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    verifier = BatchVerification(model, generation_config, model_kwargs)
    # As plain decoding has it: a row that has ended is padded if there is an end-of-text token.
    # Otherwise (stop strings alone) it goes on until all have ended.
    pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    returned = generation_config.return_dict_in_generate
    keeps_cache = returned or getattr(verifier.cache, "_is_user_defined", False)

    prompts = _prompts(input_ids, model_kwargs.get("attention_mask"))
    with drafter.batch_session(prompts, vocab_size) as drafters:
        rows = [Row(text, drafter) for text, drafter in zip(texts, drafters, strict=True)]
        try:
            _decode(
                rows,
                input_ids,
                BatchAcceptance(logits_processor, generation_config.do_sample),
                verifier,
                make_budget(max_draft_tokens, drafter, model, BatchVerification.__name__),
                chains=verification == "chain",
                pads=pads,
                keeps_cache=keeps_cache,
            )
            output_ids = _padded(rows, input_ids, generation_config._pad_token_tensor)
            if keeps_cache:
                verifier.finish(output_ids[:, input_ids.shape[1] :])
        except BaseException:  # a drafter, processor or criterion that cancels the call
            verifier.abandon()
            raise
    if not returned:
        return output_ids
    return GenerateDecoderOnlyOutput(sequences=output_ids, past_key_values=verifier.cache)


def _decode(
    rows: list[Row],
    input_ids: torch.Tensor,
    acceptance: BatchAcceptance,
    verifier: BatchVerification,
    budget: Budget,
    chains: bool,
    pads: bool,
    keeps_cache: bool,
) -> None:
    """The loop. A pass yields the accepted draft tokens and one more for each row that goes on."""
    all_rows = rows
    stats = rows[0].drafter.stats  # the given drafter's: it drafts for the first row
    began = perf_counter()
    logits = verifier.prefill(input_ids)[:, None]  # (R, 1, vocab_size)
    _accept(rows, acceptance, logits, [DraftTree.empty()] * len(rows))
    for row, row_logits in zip(rows, logits, strict=True):
        row.drafter.observe(row.new_tokens, row_logits)
    stats.record_rows([(0, 0)] * len(rows))
    prefilled = committed = perf_counter()

    while True:
        if not keeps_cache:
            rows = _without_ended(rows, verifier, pads)
        # Where ended rows are not padded, they go on until they are as long as the longest.
        longest = 0 if pads else _longest(all_rows)
        going = [row.stopped_at is None or len(row.text) < longest for row in rows]
        if not any(going):
            break
        positions = verifier.last_positions.tolist()
        drafts = [
            _draft(row, verifier, position, budget.most, chains) if goes_on else DraftTree.empty()
            for row, goes_on, position in zip(rows, going, positions, strict=True)
        ]
        drafts = budget.trim([row.drafter for row in rows], drafts, perf_counter() - committed)
        drafted = perf_counter()
        last_tokens = np.array([row.new_tokens[-1] for row in rows])
        logits = verifier.verify(last_tokens, drafts)  # (R, 1 + T, vocab_size)
        moving = [i for i, goes_on in enumerate(going) if goes_on]
        moving_rows, moving_drafts = [rows[i] for i in moving], [drafts[i] for i in moving]
        moving_logits = logits if len(moving) == len(rows) else logits[moving]
        _accept(moving_rows, acceptance, moving_logits, moving_drafts)
        verified = perf_counter()
        emitted = [
            row.new_tokens if goes_on else None for row, goes_on in zip(rows, going, strict=True)
        ]
        paths = [
            row.text.path if goes_on else None for row, goes_on in zip(rows, going, strict=True)
        ]
        verifier.commit(paths)
        budget.record(emitted, logits.shape[1], verified - drafted)
        for row, draft, row_logits in zip(moving_rows, moving_drafts, moving_logits, strict=True):
            row.drafter.observe(row.new_tokens, row_logits[: 1 + len(draft)])

        stats.record_rows(
            (len(draft), len(row.text.path))
            for row, draft in zip(moving_rows, moving_drafts, strict=True)
        )
        stats.drafting_seconds += drafted - committed
        stats.verifying_seconds += verified - drafted
        committed = perf_counter()
        stats.other_seconds += committed - verified
    stats.prefill_seconds = prefilled - began


def _accept(
    rows: list[Row], acceptance: BatchAcceptance, logits: torch.Tensor, drafts: list[DraftTree]
) -> None:
    all_tokens = acceptance.accept([row.text for row in rows], logits, drafts)
    for row, tokens in zip(rows, all_tokens, strict=True):
        row.new_tokens = np.array(tokens)
        if row.stopped_at is None and row.text.finished:
            row.stopped_at = len(row.text)


def _without_ended(rows: list[Row], verifier: BatchVerification, pads: bool) -> list[Row]:
    """The rows that may need more tokens, now or when others have become longer. The verifier drops
    the others, which then cost nothing any more."""
    kept = [
        i
        for i, row in enumerate(rows)
        if row.stopped_at is None or not (pads or len(row.text) == row.text.max_length)
    ]
    if 0 < len(kept) < len(rows):
        verifier.select(kept)
    return [rows[i] for i in kept]


def _longest(rows: list[Row]) -> int:
    """How long the output will at least be: plain decoding ends where the last row is stopped."""
    return max(row.stopped_at or len(row.text) for row in rows)


def _draft(
    row: Row, verifier: BatchVerification, last_position: int, budget: int, chain: bool
) -> DraftTree:
    if budget == 0:
        return DraftTree.empty()
    config = verifier.model.config.get_text_config(decoder=True)
    limit = depth_limit(config, last_position, len(row.text), row.text.max_length)
    if limit <= 0:
        return DraftTree.empty()
    return checked_draft(row.drafter, budget, config.vocab_size, chain).truncated(limit)


def _prompts(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[np.ndarray]:
    """The prompt of each row without its padding, int64 of shape `(n,)`."""
    ids = input_ids.numpy(force=True).astype(np.int64)
    if mask is None:
        return list(ids)
    # The mask also describes what a given cache holds and the ids lack.
    kept = mask[:, -ids.shape[1] :].numpy(force=True).astype(np.bool_)
    return [row[is_kept] for row, is_kept in zip(ids, kept, strict=True)]


def _padded(
    rows: list[Row], input_ids: torch.Tensor, pad_token: torch.Tensor | None
) -> torch.Tensor:
    """All texts, `(R, length)`: shorter ones padded, what lies past the end of the last dropped."""
    length = _longest(rows)
    ids = input_ids.new_full((len(rows), length), 0 if pad_token is None else int(pad_token))
    for i, row in enumerate(rows):
        ids[i, : len(row.text)] = row.text.ids[0, :length]
    return ids
