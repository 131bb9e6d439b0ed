"""The decoding loop: draft, trim, forward, accept, keep, observe.

[`speculate`] returns what `generate` would have returned without drafts. Greedy or sampled, each
token is chosen from the target model's own logits with the call's own logits processors, stopping
criteria and random numbers, in the order of plain decoding; a draft only decides how many tokens
one forward pass yields.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
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
from ..drafting.stats import SpeculationStats
from ..drafting.tree import DraftTree
from ..verification.probe import select_verifier
from ..verification.reach import Reach
from ..verification.verifier import Verifier
from .acceptance import accept
from .budget import Budget, make_budget
from .entry_point import entry_point
from .processors import criteria_of_rows, processors_of_rows
from .row import Row
from .validation import check_batch, check_model, check_options, check_request

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

logger = logging.getLogger("hf_refspec")


@entry_point("streamer")
@torch.no_grad()
def speculate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    candidate_generator: CandidateGenerator | None = None,
    max_draft_tokens: int | Literal["auto"] | None = "auto",
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
            in one forward pass (of each row), 0 for plain decoding. `"auto"`, or `None`, verifies
            as many as pay for themselves, see [`~generation.budget.AutoBudget`]; a
            `CandidateGenerator` decides itself.
        verification (`str`, *optional*, defaults to `"auto"`): `"tree"` verifies all branches of a
            draft, `"chain"` its best path. `"auto"` takes the tree where a probe of the model finds
            it exact, else the chain; where neither is exact it decodes plainly, with a warning.

    Returns:
        What `generate` returns: ids `(rows, length)`, padded on the right where a row ends early,
        or a `GenerateDecoderOnlyOutput`.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an argument asks for what cannot be lossless, see the README's limits.
        RuntimeError: If another call is using this drafter.
    """
    drafter = ReferenceCopy() if candidate_generator is None else candidate_generator
    max_draft_tokens = "auto" if max_draft_tokens is None else max_draft_tokens
    check_model(model, "candidate_generator")
    check_options(drafter, max_draft_tokens, verification)
    check_request(input_ids, generation_config, model_kwargs, "candidate_generator")
    check_batch(input_ids, generation_config, streamer)
    if not isinstance(drafter, Drafter):
        drafter = CandidateChain(drafter)
        verification = "chain" if verification == "auto" else verification
    rows = _rows(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    with drafter.sessions(_prompts(input_ids, model_kwargs), vocab_size) as drafters:
        verifier, found = select_verifier(
            model,
            verification,
            len(rows),
            generation_config,
            model_kwargs,
            drafts=max_draft_tokens != 0,
        )
        if streamer is not None:
            streamer.put(input_ids.cpu())
        if verifier is None:
            logger.warning(
                "%s returns other logits for several tokens in one pass than for one after "
                "another, so that no draft can be verified: decoding plainly, with the same result "
                "and no speed-up (%s).",
                type(model).__name__,
                found,
            )
            return _decode_plainly(
                drafters,
                model,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                streamer=streamer,
                **model_kwargs,
            )
        # As plain decoding has it: a row that has ended is padded if there is an end-of-text token.
        # Otherwise (stop strings alone) it goes on until all have ended.
        pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        returned = generation_config.return_dict_in_generate
        keeps_cache = bool(returned or getattr(verifier.cache, "_is_user_defined", False))
        loop = Loop(
            verifier,
            make_budget(max_draft_tokens, drafter, model, verifier.name),
            Reach(type(verifier), model, len(rows), model_kwargs),
            drafter.stats,
            chains=verification == "chain" or not verifier.takes_trees,
        )
        try:
            loop.run(rows, drafters, pads, keeps_cache)
            ids = _padded(rows, input_ids, generation_config._pad_token_tensor)
            if keeps_cache:
                verifier.finish(ids)
        except BaseException:  # a drafter, processor, criterion or streamer that cancels the call
            verifier.abandon()
            raise
    if streamer is not None:
        streamer.end()
    if not returned:
        return ids
    return GenerateDecoderOnlyOutput(
        sequences=ids,
        scores=rows[0].scores,
        logits=rows[0].logits,
        past_key_values=verifier.cache,
    )


@dataclass
class Loop:
    """The forward passes of one call, each over a draft for every row.

    Attributes:
        verifier ([`Verifier`]): Runs the target model.
        budget ([`Budget`]): Says how many nodes are drafted, and which are verified.
        reach ([`Reach`]): Says how far drafts may reach.
        stats ([`SpeculationStats`]): Of the call.
        chains (`bool`): Whether drafts must not branch.
    """

    verifier: Verifier
    budget: Budget
    reach: Reach
    stats: SpeculationStats
    chains: bool

    def run(self, rows: list[Row], drafters: list[Drafter], pads: bool, keeps_cache: bool) -> None:
        """Decodes until all rows have ended.

        Args:
            rows (`list[Row]`): R rows.
            drafters (`list[Drafter]`): One for each.
            pads (`bool`): Whether a row that has ended is padded. If not, it goes on until it is as
                long as the longest.
            keeps_cache (`bool`): Whether rows that have ended must stay in the cache.
        """
        all_rows, began = rows, perf_counter()
        self.step(rows, drafters)
        self.stats.prefill_seconds = perf_counter() - began
        while True:
            longest = 0 if pads else _longest(all_rows)
            if not keeps_cache:
                kept = [i for i, row in enumerate(rows) if _may_go_on(row, pads)]
                if 0 < len(kept) < len(rows):
                    self.verifier.select(kept)
                rows, drafters = [rows[i] for i in kept], [drafters[i] for i in kept]
            going = [not row.finished or len(row) < longest for row in rows]
            if not any(going):
                return
            self.step(rows, drafters, going)

    def step(
        self,
        rows: Sequence[Row],
        drafters: Sequence[Drafter],
        going: Sequence[bool] | None = None,
    ) -> None:
        """One forward pass: the prefill, or one over a draft for each row. It yields the accepted
        draft tokens and one more.

        Args:
            rows (sequence of [`Row`]): R rows.
            drafters (sequence of [`Drafter`]): One for each.
            going (sequence of `bool`, *optional*): Which rows go on; the others stand still.
        """
        going = going or [True] * len(rows)
        prefill, began = len(self.verifier.cached) == 0, perf_counter()
        drafts = [DraftTree.empty()] * len(rows)
        trimmed = drafts
        if not prefill:
            drafts = [self._draft(i, rows[i], drafters[i], each) for i, each in enumerate(going)]
            trimmed = self.budget.trim(drafters, drafts, perf_counter() - began)
        drafted = perf_counter()
        logits = self.verifier.forward([row.seen for row in rows], trimmed)  # (R, 1 + T, vocab)
        paths = _accepted(rows, logits, trimmed, going)
        verified = perf_counter()
        self.verifier.keep(paths)
        new_tokens = [
            None if path is None else row.tail(len(path) + 1)
            for row, path in zip(rows, paths, strict=True)
        ]
        if not prefill and self.verifier.in_step:
            passed = verified - drafted
            self.budget.record(drafters, drafts, new_tokens, logits.shape[1], passed)
        self._observe(drafters, trimmed, paths, new_tokens, logits)
        if not prefill:
            self.stats.drafting_seconds += drafted - began
            self.stats.verifying_seconds += verified - drafted
            self.stats.other_seconds += perf_counter() - verified

    def _draft(self, index: int, row: Row, drafter: Drafter, goes_on: bool) -> DraftTree:
        nodes = self.budget.nodes
        if nodes == 0 or not goes_on or self.verifier.restarted:
            return DraftTree.empty()
        position = self.verifier.last_position(index, row.seen)
        deepest = self.reach.depth(len(row.seen), position)
        if row.draft_end is not None:
            deepest = min(deepest, row.draft_end - len(row) - 1)  # one token is the target's own
        if deepest <= 0:
            return DraftTree.empty()
        draft = checked_draft(drafter, nodes, self.verifier.vocab_size, self.chains)
        return draft.truncated(deepest)

    def _observe(
        self,
        drafters: Sequence[Drafter],
        drafts: Sequence[DraftTree],
        paths: Sequence[list[int] | None],
        new_tokens: Sequence[np.ndarray | None],
        logits: torch.Tensor,
    ) -> None:
        """Tells the drafters what was verified, and counts it."""
        counts = []
        for i, (drafter, draft) in enumerate(zip(drafters, drafts, strict=True)):
            path, tokens = paths[i], new_tokens[i]
            if path is not None and tokens is not None:
                drafter.observe(tokens, draft, logits[i, : 1 + len(draft)])
                counts.append((len(draft), len(path)))
        self.stats.record_rows(counts)


def _accepted(
    rows: Sequence[Row],
    logits: torch.Tensor,
    drafts: Sequence[DraftTree],
    going: Sequence[bool],
) -> list[list[int] | None]:
    """The accepted nodes of each row, `None` for those that stand still."""
    if all(going):
        return list(accept(rows, logits, drafts))
    moving = [i for i, goes_on in enumerate(going) if goes_on]
    paths = iter(accept([rows[i] for i in moving], logits[moving], [drafts[i] for i in moving]))
    return [next(paths) if goes_on else None for goes_on in going]


def _rows(
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None,
) -> list[Row]:
    count = len(input_ids)
    processors = processors_of_rows(logits_processor, count)
    criteria = criteria_of_rows(stopping_criteria, count)
    return [
        Row(input_ids[i : i + 1], processors[i], criteria[i], generation_config, streamer)
        for i in range(count)
    ]


def _prompts(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[np.ndarray]:
    """The prompt of each row without its padding, int64 of shape `(n,)`."""
    ids = input_ids.numpy(force=True).astype(np.int64)
    mask = model_kwargs.get("attention_mask")
    if mask is None or mask.ndim != 2:
        return list(ids)
    # The mask also describes what a given cache holds and the ids lack.
    kept = mask[:, -ids.shape[1] :].numpy(force=True).astype(np.bool_)
    return [row[is_kept] for row, is_kept in zip(ids, kept, strict=True)]


def _may_go_on(row: Row, pads: bool) -> bool:
    """Whether a row may need more tokens, now or when others have become longer."""
    return not row.finished or not (pads or len(row) == row.max_length)


def _longest(rows: list[Row]) -> int:
    """How long the output will at least be: plain decoding ends where the last row is stopped."""
    return max(row.stopped_at or len(row) for row in rows)


def _padded(
    rows: list[Row], input_ids: torch.Tensor, pad_token: torch.Tensor | None
) -> torch.Tensor:
    """All texts, `(R, length)`: shorter ones padded, what lies past the end of the last dropped."""
    length = _longest(rows)
    if len(rows) == 1:
        return rows[0].ids[:, :length]
    ids = input_ids.new_full((len(rows), length), 0 if pad_token is None else int(pad_token))
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row.ids[0, :length]
    return ids


def _decode_plainly(
    drafters: list[Drafter], model: PreTrainedModel, input_ids: torch.Tensor, **kwargs: Any
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Plain decoding by transformers itself; the drafters are told what came of it."""
    output = type(model)._sample(model, input_ids, **kwargs)
    ids = output if isinstance(output, torch.Tensor) else output.sequences
    new_ids = ids[:, input_ids.shape[1] :].numpy(force=True).astype(np.int64)
    for _ in range(new_ids.shape[1]):
        drafters[0].stats.record_rows([(0, 0)] * len(new_ids))
    for drafter, row in zip(drafters, new_ids, strict=True):
        for token in _emitted(row, kwargs["generation_config"]) if len(new_ids) > 1 else row:
            drafter.observe(token[None], DraftTree.empty(), None)
    return output


def _emitted(row: np.ndarray, generation_config: GenerationConfig) -> np.ndarray:
    """New ids of one of several rows without the padding that follows where it ended early."""
    eos, pad = generation_config._eos_token_tensor, generation_config._pad_token_tensor
    if eos is None or pad is None:
        return row
    ends = np.flatnonzero(np.isin(row, eos.numpy(force=True)))
    if len(ends):
        return row[: ends[0] + 1]
    return row[: np.flatnonzero(row != int(pad)).max(initial=-1) + 1]  # another criterion
