"""Rows: the texts of a call, and what plain decoding does with each of their tokens.

Logits processors, the choice, stopping criteria, the streamer: a row does for every token on the
accepted path of a draft what plain decoding does for one token after another, in the same order and
never for a token off that path, so that processors and criteria that keep state, random numbers and
streamers cannot tell the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation import BaseStreamer

from ..drafting.contract import Drafter, Noise, Sampling
from ..refusals import is_known
from ..verification.passes import TokenSequence, random_numbers

# The size of the noise that is kept. A row that is much shorter than the others draws its columns
# again.
_KEPT_BYTES = 1 << 26


class ColumnNoise:
    """The random numbers of several sampled rows, as plain decoding draws them: from a generator's
    state on, by default the device's own.

    `torch.multinomial` chooses the argmax of `probs / noise`; the noise is exponential and does not
    depend on the probabilities. Plain decoding draws it once for each column of new tokens, for all
    rows at once, ended ones too. With drafts rows reach a column in different passes: each takes
    its own part of the column's noise then, so that the same seed gives the same text.
    Drafters may know the noise of columns to come, see [`~row.Row.noise_ahead`].
    """

    def __init__(
        self, rows: int, device: torch.device, generator: torch.Generator | None = None
    ) -> None:
        self._rows = rows
        self._device = device
        self._generator = torch.Generator(device)
        state = random_numbers(device).get_rng_state if generator is None else generator.get_state
        self._states = [state()]  # before each column
        self._kept: dict[int, torch.Tensor] = {}
        self._vocab_size = 0  # the logits', which may be more than a drafter knows

    def of(self, row: int, column: int, vocab_size: int) -> torch.Tensor:
        """A row's noise `(vocab_size,)` for new token `column`; the first call sets the size."""
        self._vocab_size = self._vocab_size or vocab_size
        for missing in range(len(self._states) - 1, column):
            self._draw(missing)
        if column not in self._kept:
            self._draw(column)
        return self._kept[column][row]

    def _draw(self, column: int) -> None:
        shape = self._rows, self._vocab_size
        noise = torch.empty(shape, dtype=torch.float32, device=self._device)
        if len(self._kept) >= max(1, _KEPT_BYTES // noise.nbytes):
            del self._kept[min(self._kept)]
        self._generator.set_state(self._states[column])
        self._kept[column] = noise.exponential_(generator=self._generator)
        if column == len(self._states) - 1:
            self._states.append(self._generator.get_state())

    def end(self, columns: int) -> None:
        """Leaves the device's generator where plain decoding of this number of columns does."""
        random_numbers(self._device).set_rng_state(self._states[columns])


@dataclass(frozen=True, slots=True)
class RowMark:
    """An earlier state of a row: its length and end, what was recorded, the random numbers."""

    length: int
    stopped_at: int | None
    scores: tuple[torch.Tensor, ...] | None
    logits: tuple[torch.Tensor, ...] | None
    random_state: torch.Tensor | None


class Row:
    """The prompt `(1, prompt_length)` with its padding, and the tokens that the target model chose.

    Attributes:
        drafter ([`Drafter`]): Drafts what may follow; by default nothing.
        stopped_at (`int`, *optional*): The length at which a stopping criterion first ended it.
        seen ([`TokenSequence`]): The tokens that the model sees, the text itself unless set.
        draft_end (`int`, *optional*): The length that no draft passes, `max_length` unless set.
        sampling ([`Sampling`], *optional*): How it samples; `None` if it is greedy.
        generator (`torch.Generator`, *optional*): Draws its random numbers; by default torch's own.
        noise (`Callable`, *optional*): Returns random numbers that were drawn ahead, by the number
            of the new token and the size of the vocabulary, see [`ColumnNoise`].
        scores, logits (`tuple[torch.Tensor]` or `None`): Processed and raw logits, float32 of shape
            `(1, vocab_size)` for each token, where the generation config asks for them.
        is_recorded (`bool`): True if it asks for scores or logits.
        calls_others (`bool`): True if a processor, criterion or streamer is code of others.
        takes_argmax (`bool`): True if each token is the argmax of the raw logits, and nothing is
            recorded.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
        drafter: Drafter | None = None,
        generator: torch.Generator | None = None,
        noise: Callable[[int, int], torch.Tensor] | None = None,
    ) -> None:
        config = generation_config
        self.drafter = Drafter() if drafter is None else drafter
        self.stopped_at: int | None = None
        self.max_length: int | None = None
        recorded = config.return_dict_in_generate
        none: tuple[torch.Tensor, ...] = ()
        self.scores = none if recorded and config.output_scores else None
        self.logits = none if recorded and config.output_logits else None
        self.is_recorded = self.scores is not None or self.logits is not None
        self.logits_processor = logits_processor
        self.do_sample = bool(config.do_sample)
        self.takes_argmax = not (self.do_sample or logits_processor or self.is_recorded)
        self.sampling = Sampling.of(config)
        self._context: TokenSequence | None = None
        self.output: list[int] = []
        self._ids = input_ids
        self._prompt_length = input_ids.shape[1]
        self._streamer = streamer
        called = [*logits_processor, *stopping_criteria, *([] if streamer is None else [streamer])]
        self.calls_others = not all(map(is_known, called))
        self._eos_ids: set[int] = set()
        self._other_criteria = StoppingCriteriaList()
        self._reminder: MaxLengthCriteria | None = None  # warns once past the model's positions
        # The criteria of length and of an end token, which every call has, are asked on the host:
        # there they do not synchronise with a GPU.
        for criterion in stopping_criteria:
            if type(criterion) is EosTokenCriteria:
                self._eos_ids.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxLengthCriteria:
                self.max_length = min(criterion.max_length, self.max_length or criterion.max_length)
                if criterion.max_position_embeddings is not None:
                    self._reminder = criterion
            else:
                self._other_criteria.append(criterion)
        self.draft_end: int | None = self.max_length
        self.generator = generator
        self.noise = noise

    def __len__(self) -> int:
        return self._prompt_length + len(self.output)

    @property
    def seen(self) -> TokenSequence:
        # Without a reference to itself, which would keep its drafter until garbage is collected.
        return self if self._context is None else self._context

    def go_on_in(self, context: TokenSequence, draft_end: int) -> None:
        """Lets the model see these tokens in place of the text, and no draft pass this length."""
        self._context = context
        self.draft_end = draft_end if self.max_length is None else min(draft_end, self.max_length)

    def draft_by(self, drafter: Drafter) -> None:
        """Lets another drafter draft what follows."""
        self.drafter = drafter

    def stop(self, length: int) -> None:
        """Ends it at this length, if nothing has ended it before."""
        self.stopped_at = min(length, self.stopped_at or length)

    @property
    def ids(self) -> torch.Tensor:
        """Prompt and output, `(1, length)`, on the prompt's device."""
        if (missing := len(self) - self._ids.shape[1]) > 0:
            # Not blocking: a copy to a GPU would otherwise wait for all that is queued there.
            new_ids = torch.tensor([self.output[-missing:]], device="cpu")
            new_ids = new_ids.to(self._ids.device, non_blocking=True)
            self._ids = torch.cat([self._ids, new_ids], dim=-1)
        return self._ids

    def tail(self, count: int) -> np.ndarray:
        """The last `count` tokens on the host, int64 of shape `(count,)`."""
        if count > len(self.output):
            return self.ids[0, len(self) - count :].numpy(force=True).astype(np.int64)
        return np.array(self.output[len(self.output) - count :], dtype=np.int64)

    def choose(self, logits: torch.Tensor) -> int:
        """The next token by the target's logits `(vocab_size,)`, as `GenerationMixin._sample`
        chooses it: one draw from the generator for each token that is sampled."""
        ids = self.ids
        next_logits = logits[None].to(copy=True, dtype=torch.float32, device=ids.device)
        next_scores = self.logits_processor(ids, next_logits)
        if next_scores.shape[:-1] != (1,):
            names = ", ".join(type(processor).__name__ for processor in self.logits_processor)
            raise ValueError(
                f"`logits_processor` ({names}) returned scores of shape "
                f"{tuple(next_scores.shape)} for one row of shape {tuple(next_logits.shape)}"
            )
        if self.scores is not None:
            self.scores += (next_scores,)
        if self.logits is not None:
            self.logits += (next_logits,)
        return choose_tokens([self], next_scores)[0]

    def processed_blindly(self, logits: torch.Tensor) -> torch.Tensor:
        """The scores of logits `(n, vocab_size)` by processors that do not look at the text."""
        no_ids = torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
        return self.logits_processor(no_ids, logits.to(torch.float32, copy=True))

    def noise_ahead(self, vocab_size: int) -> Noise:
        """The random numbers `(vocab_size,)` of the next tokens, counted from 0; the generator
        stays where it is. If `torch.multinomial` does not draw as `ColumnNoise` does, or a
        processor draws from the same generator, the tokens are chosen by other numbers: drafts are
        accepted less often, and no token changes."""
        if (noise := self.noise) is not None:
            length = len(self.output)
            return lambda place: noise(length + place, vocab_size)
        device = self._ids.device
        generator = self.generator
        ahead = cache(lambda: ColumnNoise(1, device, generator))  # look-up drafters never ask
        return lambda place: ahead().of(0, place, vocab_size)

    def append(self, token: int) -> bool:
        """Emits a token, and says whether a stopping criterion holds after it."""
        self.output.append(token)
        stopped = token in self._eos_ids or (
            self.max_length is not None and len(self) >= self.max_length
        )
        reminder = self._reminder
        if reminder is not None and len(self) > reminder.max_position_embeddings:
            reminder(self.ids, None)
            self._reminder = None
        if self._other_criteria:  # always asked: they may keep state
            stopped = bool(self._other_criteria(self.ids, self.scores).all()) or stopped
        if stopped:
            self.stopped_at = self.stopped_at or len(self)
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token], device="cpu"))
        return stopped

    def replace(self, count: int, tokens: list[int], stopped_at: int | None) -> None:
        """Replaces the last `count` tokens and the end by another rank's."""
        length = len(self) - count
        self.output[length - self._prompt_length :] = tokens
        self._ids = self._ids[:, :length]
        self.stopped_at = stopped_at

    def mark(self) -> RowMark:
        """A snapshot for [`~Row.roll_back`]."""
        state = random_numbers(self._ids.device).get_rng_state() if self.do_sample else None
        return RowMark(len(self), self.stopped_at, self.scores, self.logits, state)

    def roll_back(self, mark: RowMark) -> None:
        """Goes back to a mark. Later tokens are sampled again with the same random numbers; logits
        processors and stopping criteria are asked again, and must depend on the ids alone. Streamed
        tokens stay streamed."""
        self.output = self.output[: mark.length - self._prompt_length]
        self._ids = self._ids[:, : mark.length]
        self.stopped_at = mark.stopped_at
        self.scores = mark.scores
        self.logits = mark.logits
        if mark.random_state is not None:
            random_numbers(self._ids.device).set_rng_state(mark.random_state)

    def choose_at(self, mark: RowMark, logits: torch.Tensor) -> int:
        """The token that other logits, `(vocab_size,)`, would have given at a mark."""
        now = self.mark()
        earlier = copy(self)
        earlier.roll_back(mark)
        token = earlier.choose(logits)
        self.roll_back(now)  # the random numbers, which both draw from
        return token


def choose_tokens(rows: Sequence[Row], scores: torch.Tensor) -> list[int]:
    """A token for each row of processed scores `(R, vocab_size)`."""
    first = rows[0]
    if not first.do_sample:
        return scores.argmax(dim=-1).tolist()
    probs = torch.nn.functional.softmax(scores, dim=-1)
    if first.noise is None:
        return torch.multinomial(probs, num_samples=1, generator=first.generator)[:, 0].tolist()
    noise = [row.noise(len(row.output), probs.shape[1]) for row in rows if row.noise is not None]
    return checked_tokens(drawn(scores, torch.stack(noise)))


def drawn(scores: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The tokens `(n,)` that scores and noise `(n, vocab_size)` draw; -1 where one is NaN."""
    ratios = torch.nn.functional.softmax(scores, dim=-1) / noise.to(scores.device)
    chosen = ratios.argmax(dim=-1, keepdim=True)
    return chosen.masked_fill_(ratios.gather(1, chosen).isnan(), -1)[:, 0]


def checked_tokens(chosen: torch.Tensor) -> list[int]:
    """Drawn tokens on the host; raises what `torch.multinomial` raises about NaN."""
    tokens: list[int] = chosen.tolist()
    if -1 in tokens:
        raise RuntimeError("the probabilities of the next token contain `nan`")
    return tokens


def longest_row(rows: Sequence[Row]) -> int:
    """The least length of the output: plain decoding ends where the last row is stopped."""
    return max(row.stopped_at or len(row) for row in rows)


def own_length(row: Row, pads: bool) -> int:
    """The number of tokens of a row that are returned before its padding."""
    return row.stopped_at if pads and row.stopped_at is not None else len(row)


def padded_ids(rows: Sequence[Row], length: int, pads: bool, pad_id: int) -> torch.Tensor:
    """The first tokens of all rows, `(R, length)`: rows that have ended before are padded."""
    ids = rows[0].ids.new_full((len(rows), length), pad_id)
    for i, row in enumerate(rows):
        end = min(own_length(row, pads), length)
        ids[i, :end] = row.ids[0, :end]
    return ids


def prompt_tokens(
    input_ids: torch.Tensor, model_kwargs: Mapping[str, Any], vocab_size: int
) -> list[np.ndarray]:
    """The prompt of each row, int64 of shape `(n,)`, without padding and without ids outside of the
    vocabulary, by which some models mark images."""
    ids = input_ids.numpy(force=True).astype(np.int64)
    kept = (ids >= 0) & (ids < vocab_size)
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        # The mask also covers tokens that a given cache holds and the ids lack.
        kept &= (mask[:, -ids.shape[1] :] != 0).numpy(force=True)
    return [row[is_kept] for row, is_kept in zip(ids, kept, strict=True)]
