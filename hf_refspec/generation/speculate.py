"""The entry point of `generate(candidate_generator=...)`.

[`speculate`] returns what `generate` would have returned without drafts, see `loop.py`.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import CandidateGenerator, GenerateDecoderOnlyOutput

from ..drafting.calls import AwaitingKernels, drafter_call, remember_outputs
from ..drafting.candidates import CandidateChain, as_drafter
from ..drafting.drafter import Drafter, Sampling
from ..drafting.observation import Observation
from ..drafting.stats import DraftStats
from ..text_config import text_config
from ..transformers_names import (
    CACHE_NAMES,
    belongs_to_caller,
    decode_plainly,
    decoder_output,
    ends_and_padding,
    is_synced,
)
from ..verification.caches import find_cache
from ..verification.choice import Choice, RefusedCallError, select_verifier
from ..verification.draft_limits import InexactTreesError
from ..verification.probe import error_line
from ..verification.random_state import random_numbers, random_state, set_random_state
from ..verification.ranks import Ranks, kept_in_step
from ..verification.slots import NoRoomError
from .batch import BatchCriteria, is_of_transformers, processor_of_row
from .column_noise import ColumnNoise
from .default_drafter import drafter_of_call
from .loop import Loop
from .plain import Emitted, cache_mark, why_plain
from .row import Row, longest_row, own_length, padded, prompt_tokens
from .step import is_blind
from .validation import (
    FURTHER_OUTPUTS,
    REPRODUCIBLE,
    check_model,
    check_options,
    check_reproducible,
    check_request,
    check_steps,
)

if TYPE_CHECKING:
    from transformers.generation import BaseStreamer

logger = logging.getLogger("hf_refspec")

Output: TypeAlias = GenerateDecoderOnlyOutput | torch.Tensor


@torch.no_grad()
def speculate(
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

    `model.generate(..., candidate_generator=drafter)` comes here too. `generate` prepares all
    arguments but these:

    Args:
        candidate_generator ([`Drafter`], [`Datastore`], `CandidateGenerator` or `"auto"`,
            *optional*, defaults to `"auto"`): What drafts; a datastore is taken as
            `DatastoreDrafts(store)`, a transformers `CandidateGenerator` is verified as a chain.
            `"auto"`, or `None`, is `ReferenceCopy() | TokenRecycling()`, whose table is kept at the
            model from call to call, and `SiblingCopy()` for rows of one prompt. With
            `verification="reproducible"` `None` drafts nothing.
        max_draft_tokens (`int` or `"auto"`, *optional*, defaults to `"auto"`): The most draft nodes
            in one forward pass (of each row), 0 for plain decoding. `"auto"`, or `None`, verifies
            those that pay for themselves, see [`~generation.budget.AutoBudget`]; a
            `CandidateGenerator` decides itself.
        verification (`str`, *optional*, defaults to `"auto"`): `"tree"` verifies all branches of a
            draft, `"chain"` its best path. `"auto"` takes the tree where a probe of the model finds
            it exact, else the chain; where neither is exact it decodes plainly, with a warning.
            `"reproducible"` verifies chains by passes of one width in a static cache: ids, logits
            and scores are then the same bit by bit whatever was drafted, in bfloat16 and float16
            too, and as without a `candidate_generator`.
        adds_cache (`bool`, *optional*, defaults to `False`): Whether plain decoding would have no
            cache: the model is configured so.

    Returns:
        What `generate` returns: ids `(rows, length)`, padded on the right where a row ends early,
        or a `GenerateDecoderOnlyOutput`.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an argument asks for what cannot be lossless, see the documentation's limits.
        RuntimeError: If another call is using this drafter.
    """
    max_draft_tokens = "auto" if max_draft_tokens is None else max_draft_tokens
    if candidate_generator is None and verification == REPRODUCIBLE:
        candidate_generator, max_draft_tokens = Drafter(), 0
    check_model(model, "candidate_generator")
    check_options(max_draft_tokens, verification)
    is_auto = candidate_generator is None or candidate_generator == "auto"
    given = None if is_auto else as_drafter(candidate_generator)
    check_request(input_ids, generation_config, model_kwargs, "candidate_generator")
    check_steps(model, model_kwargs, "candidate_generator")
    if verification == REPRODUCIBLE:
        check_reproducible(input_ids, generation_config, model_kwargs)
    if isinstance(given, CandidateChain) and verification == "auto":
        verification = "chain"
    why = why_plain(model, len(input_ids), logits_processor, model_kwargs)
    if why is not None and verification == REPRODUCIBLE:
        raise RefusedCallError(f"`verification={REPRODUCIBLE!r}` is impossible here: {why}.")
    if why is None:
        model_kwargs = {n: value for n, value in model_kwargs.items() if n not in FURTHER_OUTPUTS}
    ranks = Ranks.of(model)
    synced = is_synced(model, synced_gpus)
    call = _Call(
        model=model,
        input_ids=input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        streamer=streamer,
        model_kwargs=model_kwargs,
        ranks=ranks,
        synced=synced,
        adds_cache=adds_cache,
    )
    with (
        kept_in_step(model, input_ids) if synced else nullcontext(),
        ranks.together(),
        drafter_of_call(model, given) as drafter,
    ):
        max_draft_tokens, verification = ranks.agree((max_draft_tokens, verification))
        return call.decode(drafter, max_draft_tokens, verification, why)


@dataclass(frozen=True)
class _Call:
    """A call as `generate` hands it over, and how it is decoded."""

    model: PreTrainedModel
    input_ids: torch.Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    streamer: BaseStreamer | None
    model_kwargs: dict[str, Any]
    ranks: Ranks
    synced: bool
    adds_cache: bool

    def decode(
        self, drafter: Drafter, max_draft_tokens: int | str, verification: str, why: str | None
    ) -> Output:
        """See [`speculate`]. Decodes plainly if drafts could change the text, which `why` says, and
        begins anew so if a probe or a forward pass raises."""
        config = self.generation_config
        if self.synced:
            config.disable_compile = True  # a graph would leave out the hook of `kept_in_step`
        if config.do_sample and not self.ranks.alone:
            numbers = random_numbers(self.input_ids.device)
            numbers.set_rng_state(self.ranks.agree(numbers.get_rng_state()))
        vocab_size = text_config(self.model).vocab_size
        prompts = prompt_tokens(self.input_ids, self.model_kwargs, vocab_size)
        sampling = Sampling.of(config)
        with drafter_call(
            drafter, prompts, vocab_size, sampling, self.logits_processor
        ) as drafters:
            begins_anew = self.ranks.alone and verification != REPRODUCIBLE
            random_state_before = random_state(self.input_ids.device)
            restore_cache = cache_mark(find_cache(self.model_kwargs))
            try:
                choice = (
                    self._choice(max_draft_tokens, verification, drafter.stats)
                    if why is None
                    else Choice(None, why)
                )
            except Exception as error:
                if isinstance(error, RefusedCallError) or not begins_anew:
                    raise
                choice = Choice(None, f"a probe raised {error_line(error)}")
                set_random_state(self.input_ids.device, random_state_before)
            if self.streamer is not None:
                self.streamer.put(self.input_ids.cpu())
            if choice.verifier is None:
                return self._decode_plainly(drafters, drafter.stats, choice.why)
            rows, criteria = self._rows()
            for row, drafter_of_row in zip(rows, drafters, strict=True):
                row.drafter = drafter_of_row
            loop = Loop.over(
                choice.verifier,
                drafter,
                drafter.stats,
                max_draft_tokens=max_draft_tokens,
                rows=len(rows),
                chains=verification == "chain",
                is_probed=choice.is_probed,
                waits=True,
                reads_prompts=not self.synced,
                ranks=self.ranks,
            )
            drafter.stats.verification = choice.verifier.kind.name
            failure = None
            try:
                output = self._run(loop, rows, criteria)
            except Exception as error:
                if loop.failure is None or not begins_anew or isinstance(error, NoRoomError):
                    raise
                failure = f"a forward pass raised {error_line(loop.failure)}"
                if isinstance(error, InexactTreesError):
                    failure = str(error)
                loop.failure = None  # it holds tensors
            if failure is not None:
                set_random_state(self.input_ids.device, random_state_before)
                restore_cache()
                shown = len(rows[0]) if len(rows) == 1 else self.input_ids.shape[1]
                shown = shown if criteria is None else criteria.asked
                emitted = Emitted(rows, self.input_ids.shape[1], shown)
                return self._decode_plainly(drafters, drafter.stats, failure, emitted)
            prompt_length = self.input_ids.shape[1]
            outputs = [row.output[: own_length(row, self._pads) - prompt_length] for row in rows]
            remember_outputs(drafter.stats, drafters, outputs)
            if not drafter.stats.drafted:
                drafter.stats.reason = self._why_undrafted(loop, rows)
        if self.streamer is not None:
            self.streamer.end()
        return output

    def _choice(self, max_draft_tokens: int | str, verification: str, stats: DraftStats) -> Choice:
        return select_verifier(
            self.model,
            verification,
            len(self.input_ids),
            self.generation_config,
            self.model_kwargs,
            drafts=max_draft_tokens != 0 or self.adds_cache,
            probes_later=verification == "auto" and self.ranks.alone and not self.adds_cache,
            stats=stats,
        )

    def _run(self, loop: Loop, rows: list[Row], criteria: BatchCriteria | None) -> Output:
        verifier = loop.verifier
        returned = self.generation_config.return_dict_in_generate
        keeps_cache = bool(returned or belongs_to_caller(verifier.entries.cache))
        pads = self._pads
        noise = None
        # Drawn ahead, all tokens of a pass are chosen at once: on the CPU that would cost more than
        # it saves.
        on_device = self.input_ids.device.type != "cpu" and is_blind(self.logits_processor)
        if self.generation_config.do_sample and (len(rows) > 1 or on_device):
            noise = ColumnNoise(len(rows), self.input_ids.device)
            for i, row in enumerate(rows):
                row.noise = partial(noise.of, i)
        try:
            loop.run(rows, pads, keeps_cache or not verifier.kind.drops_rows, criteria)
            ids = padded(rows, longest_row(rows), pads, self._pad_id)
            self.ranks.agree(None)  # a rank that has failed could not run the last pass
            with loop.noting_failures():
                if keeps_cache:
                    verifier.finish(ids, [own_length(row, pads) for row in rows])
                else:
                    verifier.entries.release()
        except BaseException:  # a drafter, processor, criterion or streamer that cancels the call
            verifier.abandon()
            raise
        finally:
            if noise is not None:
                noise.end(longest_row(rows) - self.input_ids.shape[1])
        if not returned:
            return ids
        return decoder_output(ids, verifier.entries.cache, rows[0].scores, rows[0].logits)

    @staticmethod
    def _why_undrafted(loop: Loop, rows: list[Row]) -> str:
        """Why a call that could have verified drafts has verified none."""
        if loop.budget.max_nodes == 0:
            return "`max_draft_tokens=0`"
        drafters = [row.drafter for row in rows]
        if all(isinstance(each, AwaitingKernels) and not each.has_begun for each in drafters):
            return "the kernels were still being compiled; call `hf_refspec.warmup()` before"
        if (finding := loop.limits.refused) is not None:
            return (
                finding.failure
                or f"drafts were found inexact at the length of the text ({finding})"
            )
        if not loop.offered:
            return "the drafter found nothing to draft"
        return "no draft was expected to pay; `max_draft_tokens=8` verifies drafts anyway"

    def _decode_plainly(
        self,
        drafters: list[Drafter],
        stats: DraftStats,
        why: str,
        begun: Emitted | None = None,
    ) -> Output:
        """Plain decoding by transformers itself, also of a call that has `begun`; the drafters
        observe its tokens."""
        logger.warning(
            "%s decodes plainly, with the same text and no speed-up: %s.",
            type(self.model).__name__,
            why,
        )
        stats.reason = why
        stats.verification = "none"
        kwargs = self.model_kwargs
        if self.adds_cache:
            self.generation_config.use_cache = False
            others = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}
            kwargs = {**others, "use_cache": False}
        processors = self.logits_processor
        criteria = self.stopping_criteria
        streamer = self.streamer
        if begun is not None:
            processors = begun.processors(processors)
            criteria = begun.criteria(criteria)
            streamer = begun.streamer(streamer)
        output = decode_plainly(
            self.model,
            self.input_ids,
            logits_processor=processors,
            stopping_criteria=criteria,
            generation_config=self.generation_config,
            streamer=streamer,
            **kwargs,
        )
        ids = output if isinstance(output, torch.Tensor) else output.sequences
        new_ids = ids[:, self.input_ids.shape[1] :].numpy(force=True).astype(np.int64)
        emitted = [self._emitted(row) for row in new_ids]
        known = [0] * len(emitted)  # tokens of each row that were counted and observed before
        if begun is not None:
            known = [len(row.output) for row in begun.rows]
            if begun.rows[0].scores:  # the others are those of a choice between one token
                output.scores = (*begun.rows[0].scores, *output.scores[known[0] :])
        for column in range(new_ids.shape[1]):
            spans = zip(known, emitted, strict=True)
            stats.record_rows([(0, 0) for begin, new in spans if begin <= column < len(new)])
        remember_outputs(stats, drafters, [tokens.tolist() for tokens in emitted])
        for drafter, begin, tokens in zip(drafters, known, emitted, strict=True):
            for token in tokens[begin:]:
                drafter.observe(Observation(token[None]))
        return output

    def _emitted(self, row: np.ndarray) -> np.ndarray:
        """The new ids of a row without the padding behind the end of one that ended early."""
        eos, pad = ends_and_padding(self.generation_config)
        if len(self.input_ids) == 1 or eos is None or pad is None:
            return row
        ends = np.flatnonzero(np.isin(row, eos.numpy(force=True)))
        if len(ends):
            return row[: ends[0] + 1]
        return row[: np.flatnonzero(row != int(pad)).max(initial=-1) + 1]  # another criterion

    def _rows(self) -> tuple[list[Row], BatchCriteria | None]:
        """The rows, and the criteria and streamer that only several rows have together."""
        count, criteria = len(self.input_ids), self.stopping_criteria
        if count == 1:
            alone = (self.logits_processor, criteria, self.generation_config, self.streamer)
            return [Row(self.input_ids, *alone)], None
        # Those of transformers are asked by each row, all others about the batch.
        of_row, of_batch = StoppingCriteriaList(), StoppingCriteriaList()
        for criterion in criteria:
            (of_row if is_of_transformers(criterion) else of_batch).append(criterion)
        rows = []
        for i in range(count):
            own = [processor_of_row(each, i, count) for each in self.logits_processor]
            made = LogitsProcessorList(own), of_row, self.generation_config
            rows.append(Row(self.input_ids[i : i + 1], *made))
        if not of_batch and self.streamer is None:
            return rows, None
        length = self.input_ids.shape[1]
        batch = (of_batch, self.streamer, length, self._pads, self._pad_id, self.ranks)
        return rows, BatchCriteria(*batch)

    @property
    def _pads(self) -> bool:
        """As plain decoding has it: a row that has ended is padded if there is an end-of-text
        token. Otherwise (stop strings alone) it goes on until all have ended."""
        return any(hasattr(criterion, "eos_token_id") for criterion in self.stopping_criteria)

    @property
    def _pad_id(self) -> int:
        _, pad = ends_and_padding(self.generation_config)
        return 0 if pad is None or len(self.input_ids) == 1 else int(pad)  # GPU waits
