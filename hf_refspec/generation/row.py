"""A row: one text of a call, and all that plain decoding does with each of its tokens.

Logits processors, the choice, stopping criteria, the streamer: a row does for every token on the
accepted path of a draft what plain decoding does for one token after another, in the same order and
never for a token off that path, so that processors and criteria that keep state, random numbers and
streamers cannot tell the difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from ..drafting.drafter import Drafter
from ..drafting.tree import DraftTree
from ..verification.restored import random_numbers
from ..verification.token_sequence import TokenSequence

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


@dataclass(frozen=True, slots=True)
class RowMark:
    """Where a row was: its length, when it was stopped, what was recorded, the random numbers."""

    length: int
    stopped_at: int | None
    scores: tuple[torch.Tensor, ...] | None
    logits: tuple[torch.Tensor, ...] | None
    random_state: torch.Tensor | None


class Row:
    """The prompt, the tokens that the target model chose, and what is drafted to follow them.

    Args:
        input_ids (`torch.LongTensor` of shape `(1, prompt_length)`): The prompt with its padding.
        logits_processor (`LogitsProcessorList`): See each prefix of the text once, in order.
        stopping_criteria (`StoppingCriteriaList`): Asked after every token.
        generation_config (`GenerationConfig`): Whether to sample, and what to record.
        streamer (`BaseStreamer`, *optional*): Gets each token once, in order.

    Attributes:
        drafter ([`Drafter`]): What drafts for it.
        draft ([`DraftTree`]): What it drafted for the next pass, or the last one.
        verified ([`DraftTree`]): The part of it that the pass verifies.
        path (`list[int]`, *optional*): The nodes of `verified` that the last pass accepted; `None`
            if the row took no part in it.
        stands_still (`bool`): Whether it takes no part in the next pass.
        stopped_at (`int`, *optional*): The length at which a stopping criterion first ended it.
        max_length (`int`, *optional*): The most tokens that it may have.
        seen ([`TokenSequence`]): What the model sees of it, the text itself unless set.
        draft_end (`int`, *optional*): The length that no draft passes, `max_length` unless set.
        generator (`torch.Generator`, *optional*): Of its random numbers, by default torch's own.
        scores, logits (`tuple[torch.Tensor]` or `None`): Processed and raw logits, float32 of shape
            `(1, vocab_size)` for each token, where the generation config asks for them.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
    ) -> None:
        config = generation_config
        recorded = config.return_dict_in_generate
        self.drafter = Drafter()
        self.draft = self.verified = DraftTree.empty()
        self.path: list[int] | None = None
        self.stands_still = False
        self.stopped_at: int | None = None
        self.max_length: int | None = None
        self.scores: tuple[torch.Tensor, ...] | None = None
        self.logits: tuple[torch.Tensor, ...] | None = None
        if recorded and config.output_scores:
            self.scores = ()
        if recorded and config.output_logits:
            self.logits = ()
        self.logits_processor = logits_processor
        self.do_sample = bool(config.do_sample)
        self.seen: TokenSequence = self
        self._ids = input_ids
        self._prompt_length = input_ids.shape[1]
        self._output: list[int] = []
        self._streamer = streamer
        self._eos_ids: set[int] = set()
        self._other_criteria = StoppingCriteriaList()
        self._split_criteria(stopping_criteria)
        self.draft_end: int | None = self.max_length
        self.generator: torch.Generator | None = None

    def _split_criteria(self, criteria: StoppingCriteriaList) -> None:
        """Takes out the two that every call has: asked on the host, they cost no wait for a GPU."""
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self._eos_ids.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxLengthCriteria:
                self.max_length = min(criterion.max_length, self.max_length or criterion.max_length)
            else:
                self._other_criteria.append(criterion)

    def __len__(self) -> int:
        return self._prompt_length + len(self._output)

    @property
    def finished(self) -> bool:
        """Whether a stopping criterion has ended it."""
        return self.stopped_at is not None

    @property
    def ids(self) -> torch.Tensor:
        """Prompt and output, `(1, length)`, on the prompt's device."""
        if (missing := len(self) - self._ids.shape[1]) > 0:
            # Not blocking: a copy to a GPU would otherwise wait for all that is queued there.
            new_ids = torch.tensor([self._output[-missing:]])
            new_ids = new_ids.to(self._ids.device, non_blocking=True)
            self._ids = torch.cat([self._ids, new_ids], dim=-1)
        return self._ids

    @property
    def output(self) -> list[int]:
        """The tokens that were chosen."""
        return self._output

    @property
    def emitted(self) -> np.ndarray:
        """The tokens of the last pass, int64 of shape `(n,)`; none if it took no part."""
        return self.tail(0 if self.path is None else len(self.path) + 1)

    def tail(self, count: int) -> np.ndarray:
        """The last `count` tokens on the host, int64 of shape `(count,)`."""
        if count > len(self._output):
            return self.ids[0, len(self) - count :].numpy(force=True).astype(np.int64)
        return np.array(self._output[len(self._output) - count :], dtype=np.int64)

    def chooses_by_logits_alone(self) -> bool:
        """Whether the next token is the argmax of the raw logits, and nothing is recorded."""
        return (
            not self.do_sample
            and len(self.logits_processor) == 0
            and self.scores is None
            and self.logits is None
        )

    def choose(self, logits: torch.Tensor) -> int:
        """The next token, as `GenerationMixin._sample` chooses it: one draw from the generator for
        each token that is sampled.

        Args:
            logits (`torch.Tensor` of shape `(vocab_size,)`): The target model's.
        """
        ids = self.ids
        next_logits = logits[None].to(copy=True, dtype=torch.float32, device=ids.device)
        next_scores = self.logits_processor(ids, next_logits)
        if self.scores is not None:
            self.scores += (next_scores,)
        if self.logits is not None:
            self.logits += (next_logits,)
        return choose_tokens(next_scores, self.do_sample, self.generator)[0]

    def append(self, token: int) -> bool:
        """Emits a token, and says whether a stopping criterion holds after it."""
        self._output.append(token)
        stopped = token in self._eos_ids or (
            self.max_length is not None and len(self) >= self.max_length
        )
        if self._other_criteria:  # always asked: they may keep state
            stopped = bool(self._other_criteria(self.ids, self.scores).all()) or stopped
        if stopped and self.stopped_at is None:
            self.stopped_at = len(self)
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token]))
        return stopped

    def replace(self, count: int, tokens: list[int], stopped_at: int | None) -> None:
        """Replaces the last `count` tokens and the end by those that another rank has chosen."""
        length = len(self) - count
        self._output[length - self._prompt_length :] = tokens
        self._ids = self._ids[:, :length]
        self.stopped_at = stopped_at

    def stop_at(self, length: int) -> None:
        """Ends it at this length, if it has not been ended before: a criterion has been asked late,
        and it may be longer by now."""
        self.stopped_at = min(length, self.stopped_at or length)

    def mark(self) -> RowMark:
        """A snapshot for [`~Row.roll_back`]."""
        state = random_numbers(self._ids.device).get_rng_state() if self.do_sample else None
        return RowMark(len(self), self.stopped_at, self.scores, self.logits, state)

    def roll_back(self, mark: RowMark) -> None:
        """Goes back to a mark. What was sampled since is sampled again with the same random
        numbers; logits processors and stopping criteria are asked again, and must go by the ids
        alone. What was streamed stays so."""
        self._output = self._output[: mark.length - self._prompt_length]
        self._ids = self._ids[:, : mark.length]
        self.stopped_at, self.scores, self.logits = mark.stopped_at, mark.scores, mark.logits
        if mark.random_state is not None:
            random_numbers(self._ids.device).set_rng_state(mark.random_state)

    def choose_at(self, mark: RowMark, logits: torch.Tensor) -> int:
        """The token that other logits, `(vocab_size,)`, would have given at a mark; nothing
        changes."""
        now, ids, output = self.mark(), self._ids, self._output
        self.roll_back(mark)
        token = self.choose(logits)
        self._ids, self._output = ids, output
        self.roll_back(now)
        return token


def choose_tokens(
    scores: torch.Tensor, do_sample: bool, generator: torch.Generator | None = None
) -> list[int]:
    """A token for each row of processed scores `(R, vocab_size)`."""
    if do_sample:
        probs = torch.nn.functional.softmax(scores, dim=-1)
        return torch.multinomial(probs, num_samples=1, generator=generator)[:, 0].tolist()
    return scores.argmax(dim=-1).tolist()
