"""Texts of many users, decoded together: rows that join and leave between forward passes.

A step is: a piece of the next prompt -> the loop's own step over all rows -> rows that have ended
leave. A prompt is prefilled by itself, in pieces, so that no other text waits longer than one piece
takes; then its keys and values join the others', see `packed.py`. Rows of models that cannot be
packed keep a loop of their own, and take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import psutil
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.candidate_generator import CandidateGenerator

from ..check_count import check_count
from ..drafting.candidates import as_drafter
from ..drafting.drafter import Drafter, Sampling
from ..drafting.stats import SpeculationStats
from ..text_config import context_length, text_config
from ..verification.cache import is_padded
from ..verification.chain import PlainVerifier
from ..verification.choice import known_finding, select_verifier
from ..verification.facts import facts_about_state
from ..verification.packed import PackedVerifier, RowEntries
from ..verification.ranks import Ranks
from ..verification.reach import Reach
from ..verification.tree import TreeVerifier
from ..verification.verifier import Verifier
from .budget import make_budget
from .default_drafter import default_drafter
from .interruptible import Interrupted, Interruptible
from .loop import Loop
from .row import Row, prompt_tokens
from .validation import (
    FURTHER_OUTPUTS,
    RefusedCallError,
    check_options,
    check_request,
    check_steps,
)

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

# A prefix is shared from this many tokens on: copying fewer is not worth looking for them.
_LEAST_SHARED = 16
# Of a text, where the memory that a row takes is estimated.
_ROW_TOKENS = 4096


@dataclass(frozen=True)
class _Call:
    """What `generate` has prepared."""

    input_ids: torch.Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    drafter: Drafter | None  # `None` is "auto"
    streamer: BaseStreamer | None
    model_kwargs: dict[str, Any]


def prepare_call(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    candidate_generator: CandidateGenerator | Literal["auto"] | None = "auto",
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> _Call:
    """What `generate` hands over to a decoding loop, for a running batch to decode."""
    check_request(input_ids, generation_config, model_kwargs, "candidate_generator")
    check_steps(model, model_kwargs, "candidate_generator")
    if len(input_ids) != 1:
        raise ValueError(
            f"`input_ids` has {len(input_ids)} rows, but a text of a running batch has one: add "
            "each by itself"
        )
    is_auto = candidate_generator is None or candidate_generator == "auto"
    drafter = None if is_auto else as_drafter(candidate_generator)
    if drafter is not None:
        drafter.check_vocabulary(text_config(model).vocab_size)
    kwargs = {name: value for name, value in model_kwargs.items() if name not in FURTHER_OUTPUTS}
    asked = logits_processor, stopping_criteria, generation_config
    return _Call(input_ids, *asked, drafter, streamer, kwargs)


class RunningText:
    """A text that waits, is decoded or has ended.

    Attributes:
        input_ids (`torch.Tensor` of shape `(1, n)`): The prompt.
        finished (`bool`): Whether it has ended.
        shared_tokens (`int`): How many tokens of the prompt another text had in common, so that
            their keys and values were copied.
        stats ([`SpeculationStats`]): Of this text. Passes that it shares with others are counted,
            not timed.
        interrupted (`Callable`, *optional*): Asked again and again while the prompt is read; the
            text ends as soon as it returns `True`. Afterwards stopping criteria are asked.
    """

    def __init__(self, call: _Call, seed: int | None, verifier: Verifier, packs: bool) -> None:
        self.input_ids = call.input_ids
        self.finished = False
        self.shared_tokens = 0
        self.stats = SpeculationStats()
        self.interrupted: Callable[[], bool] | None = None
        self._call = call
        self._verifier = verifier
        self._packs = packs  # whether it joins the others
        # Whether its prompt is read in pieces, and may share them: the first one might be nothing
        # but padding, and other positions give other keys and values.
        self._in_pieces = packs and not is_padded(call.model_kwargs) and _counts(call.model_kwargs)
        self._read = 0  # tokens of the prompt that the cache holds
        self._state: tuple[Any, ...] = ()  # of the model when it began
        self._session = ExitStack()  # from its first piece to its end
        self._loop: Loop | None = None  # its own, until it joins the others
        asked = call.logits_processor, call.stopping_criteria, call.generation_config
        self._row = Row(call.input_ids, *asked, call.streamer)
        if call.generation_config.do_sample:
            self._row.generator = torch.Generator(call.input_ids.device)
            seed = int(torch.randint(2**62, ())) if seed is None else seed
            self._row.generator.manual_seed(seed)

    @property
    def sequences(self) -> torch.Tensor:
        """Prompt and output so far, int64 of shape `(1, length)`, as `generate` returns them."""
        return self._row.ids

    @property
    def complete(self) -> bool:
        """Whether one of its stopping criteria ended it."""
        return self._row.finished

    @property
    def _ids(self) -> np.ndarray:
        return self._row.tail(len(self._row))

    def _begin(self, model: PreTrainedModel) -> None:
        call, vocab_size = self._call, self._verifier.vocab_size
        own = default_drafter(model) if call.drafter is None else nullcontext(call.drafter)
        drafter = self._session.enter_context(own)
        [prompt] = prompt_tokens(call.input_ids, call.model_kwargs, vocab_size)
        sampling = Sampling.of(call.generation_config)
        self._session.enter_context(drafter.session(prompt, vocab_size, sampling))
        self._row.drafter, self.stats = drafter, drafter.stats
        if call.streamer is not None:
            call.streamer.put(call.input_ids.cpu())
            self._session.callback(call.streamer.end)

    def _end(self) -> None:
        self.finished = True
        loop, self._loop = self._loop, None
        del self._call, self._verifier  # whoever keeps the text keeps no cache with it
        try:
            self._session.close()
        finally:
            if loop is not None:
                loop.verifier.release()


class RunningBatch:
    """Decodes texts of one model together. They join while others are decoded, and leave when they
    end; each has the logits processors, stopping criteria, streamer, random numbers and drafter of
    a call of its own, and in float32 the ids of a call of its own.

        batch = RunningBatch(model, max_rows=8)
        text = batch.add(**inputs, max_new_tokens=64)
        while not text.finished:
            batch.step()

    One thread at a time may call its methods. Where weights change, what was computed before is
    shared no more; a change of a parameter's `data` in place is not noticed: make a new batch then.

    Args:
        model ([`PreTrainedModel`]): The target model.
        max_rows (`int`, *optional*): How many texts are decoded at once. The others wait, in the
            order in which they came. By default as many as half of the free memory can hold, of
            4,096 tokens each: 16 at most on a CPU, 64 elsewhere.
        prefill_tokens (`int`, *optional*): The most tokens of a prompt that run between two steps
            of the other texts. By default 128 on a CPU, 1024 elsewhere.
        prefix_tokens (`int`, *optional*, defaults to 4096): The most tokens of texts that have
            ended whose keys and values are kept, for prompts that begin likewise (a system prompt,
            the same document). 0 shares nothing, not with texts that are running either.
        max_draft_tokens (`int` or `"auto"`, *optional*, defaults to `"auto"`): As of `generate`;
            `"auto"` chooses the best nodes of all texts together.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an option has a value that it cannot have.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_rows: int | None = None,
        prefill_tokens: int | None = None,
        prefix_tokens: int = 4096,
        max_draft_tokens: int | Literal["auto"] = "auto",
    ) -> None:
        if prefill_tokens is None:
            prefill_tokens = 128 if model.device.type == "cpu" else 1024
        max_rows = default_rows(model) if max_rows is None else max_rows
        check_count("max_rows", max_rows)
        check_count("prefill_tokens", prefill_tokens)
        check_count("prefix_tokens", prefix_tokens, least=0)
        check_options(max_draft_tokens, "auto")
        self.stats = SpeculationStats()
        self._model = model
        self.max_rows = max_rows
        self._prefill_tokens = prefill_tokens
        self._max_draft_tokens = max_draft_tokens
        self._prefixes = Prefixes(prefix_tokens)
        self._waiting: deque[RunningText] = deque()
        self._prefilling: RunningText | None = None
        self._packed: list[RunningText] = []
        self._alone: list[RunningText] = []  # each with a loop of its own
        self._verifier: PackedVerifier | None = None  # of the packed ones
        self._loop: Loop | None = None  # the same

    def __len__(self) -> int:
        """How many texts are decoded or wait."""
        return self.running + self.waiting

    @property
    def waiting(self) -> int:
        """How many texts wait for room."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """How many texts are decoded; one whose prompt is being read among them."""
        return len(self._packed) + len(self._alone) + (self._prefilling is not None)

    @torch.no_grad()
    def add(self, *, seed: int | None = None, **arguments: Any) -> RunningText:
        """Puts a text at the end of the queue.

        Args:
            seed (`int`, *optional*): Of its random numbers: it becomes the text that
                `torch.manual_seed(seed)` and a call of its own would give. By default one that
                torch draws.
            arguments: As of `generate`, for one prompt. Each text needs a drafter of its own;
                `candidate_generator` is `"auto"` unless given.

        Returns:
            [`RunningText`]: What becomes of it.

        Raises:
            TypeError, ValueError: As of `generate`; also for several prompts, for a given
                `past_key_values`, and for a model that is split over several processes.
        """
        if arguments.get("past_key_values") is not None:
            raise ValueError(
                "`past_key_values` cannot be given for a text of a running batch: leave it out; "
                "what the prompt has in common with other texts is found"
            )
        if not Ranks.of(self._model).alone:
            raise RefusedCallError(
                "A model that is split over several processes cannot decode a running batch: each "
                "would let texts join at other times. Load it in one process, with `device_map`."
            )
        call: Any = self._model.generate(**arguments, custom_generate=prepare_call)
        kwargs = call.model_kwargs
        verifier, _ = select_verifier(self._model, "auto", 1, call.generation_config, kwargs)
        if verifier is None:
            verifier = PlainVerifier(self._model, call.generation_config, kwargs)
        packs = type(verifier) is TreeVerifier and _can_be_packed(self._model, kwargs)
        text = RunningText(call, seed, verifier, packs)
        self._waiting.append(text)
        return text

    def remove(self, text: RunningText) -> None:
        """Ends a text, wherever it is; does nothing if it has ended."""
        if text.finished:
            return
        if text in self._waiting:
            self._waiting.remove(text)
        elif text is self._prefilling:
            self._prefilling = None
        elif text in self._alone:
            self._alone.remove(text)
        else:
            self._leave([text])
        text._end()

    @torch.no_grad()
    def step(self) -> list[RunningText]:
        """Runs a piece of a prompt, if there is room for its text, and one step of all other texts.

        Returns:
            `list[RunningText]`: The texts that have ended.

        Raises:
            Whatever a forward pass, a drafter, a processor or a criterion raises. The text whose
            prompt was read then ends, or, in a pass that texts share, all of these.
        """
        ended = self._read_prompt()
        try:
            self._decode()
            ended += [text for text in (*self._packed, *self._alone) if text._row.finished]
            self._leave(ended)
        except BaseException:
            self._abandon(ended)
            raise
        _end(ended)
        return ended

    def _read_prompt(self) -> list[RunningText]:
        """Runs a piece of a prompt; the text joins the others once it has its first token. Returns
        it if it has ended."""
        if self._prefilling is None:
            if not self._waiting or self.running >= self.max_rows:
                return []
            self._prefilling = self._waiting.popleft()
        text = self._prefilling
        try:
            with nullcontext() if text.interrupted is None else Interruptible(text.interrupted):
                is_read = self._read_piece(text)
        except Interrupted:
            self._prefilling = None
            return [text]
        except BaseException:
            self._prefilling = None
            text._end()
            raise
        if not is_read:
            return []
        self._prefilling = None
        if text._row.finished:
            return [text]
        try:
            self._join(text)
        except BaseException:  # the others may hold a part of it
            self._abandon([text])
            raise
        return []

    def _read_piece(self, text: RunningText) -> bool:
        """Runs a piece of a prompt; returns whether it was the last one."""
        if text._loop is None:
            self._begin(text)
        assert text._loop is not None
        end = text._read + self._prefill_tokens
        if text._in_pieces and end < text.input_ids.shape[1]:
            text._loop.read_ahead([text._row], end)
            text._read = end
            return False
        text._loop.prefill([text._row])
        return True

    def _begin(self, text: RunningText) -> None:
        """Copies what the prompt has in common with other texts, and prepares the rest."""
        text._begin(self._model)
        verifier, kwargs = text._verifier, text._call.model_kwargs
        if text._in_pieces:
            text._state = _state(self._model)
            found = self._prefixes.longest(text._ids, text._state, self._cached())
            entries, text._read = found
            text.shared_tokens = text._read
            for layer, states in zip(kwargs["past_key_values"].layers, entries, strict=False):
                layer.update(*states)
            # The first piece is a prompt of its own. The length of its mask says that its ids hold
            # what is cached as well.
            mask = kwargs.get("attention_mask")
            mask = torch.ones_like(text.input_ids) if mask is None else mask
            end = text._read + self._prefill_tokens
            positions = kwargs["position_ids"][..., :end]
            verifier.model_kwargs |= {"attention_mask": mask[:, :end], "position_ids": positions}
        text._loop = self._make_loop(verifier, text.stats, kwargs)

    def _make_loop(
        self, verifier: Verifier, stats: SpeculationStats, model_kwargs: dict[str, Any]
    ) -> Loop:
        most = 0 if isinstance(verifier, PlainVerifier) else self._max_draft_tokens
        kind = verifier.kind_of_pass, verifier.widths, verifier.packs
        budget = make_budget(most, Drafter(), self._model, *kind)
        reach = Reach(type(verifier), self._model, verifier.fewest_rows, model_kwargs)
        return Loop(verifier, budget, reach, stats, chains=not verifier.takes_trees)

    def _decode(self) -> None:
        """One step of all texts that have their first token."""
        if self._loop is not None and self._packed:
            rows = [text._row for text in self._packed]
            self._loop.prepare(rows)
            self._loop.step(rows)
            for text in self._packed:
                text.stats.record_rows([(len(text._row.verified), len(text._row.path or ()))])
        for text in self._alone:
            assert text._loop is not None
            text._loop.prepare([text._row])
            text._loop.step([text._row])

    def _join(self, text: RunningText) -> None:
        assert text._loop is not None
        if not text._packs:
            self._alone.append(text)
            return
        verifier, text._loop = text._loop.verifier, None
        assert isinstance(verifier, TreeVerifier)
        if self._verifier is None:
            self._verifier = PackedVerifier.of(verifier)
            self._loop = self._make_loop(self._verifier, self.stats, text._call.model_kwargs)
        else:
            self._verifier.join(verifier)
        self._packed.append(text)

    def _leave(self, texts: Sequence[RunningText]) -> None:
        """Takes texts out of all later steps; keeps what their prompts may share with others."""
        self._alone = [text for text in self._alone if text not in texts]
        kept = [i for i, text in enumerate(self._packed) if text not in texts]
        if len(kept) == len(self._packed):
            return
        for cached, text in zip(self._cached(), self._packed, strict=True):
            if text in texts:
                self._prefixes.keep(cached)
        self._packed = [self._packed[i] for i in kept]
        assert self._verifier is not None
        self._verifier.select(kept)

    def _cached(self) -> list[CachedText]:
        """The packed texts, as far as they are cached; of padded ones, which share nothing, none of
        their ids."""
        if self._verifier is None:
            return []
        rows = zip(self._packed, self._verifier.cached, self._verifier.entries.rows, strict=True)
        return [
            CachedText(text._ids[: n if text._in_pieces else 0], entries, text._state)
            for text, n, entries in rows
        ]

    def _abandon(self, ended: Sequence[RunningText]) -> None:
        """Ends all texts but those that wait, and these."""
        texts = [*self._packed, *self._alone, *([self._prefilling] if self._prefilling else [])]
        texts += [text for text in ended if text not in texts]
        self._packed, self._alone, self._prefilling = [], [], None
        self._loop = self._verifier = None
        _end(texts)


def _end(texts: Sequence[RunningText]) -> None:
    """Ends all of them, whatever a drafter or a streamer raises."""
    with ExitStack() as ending:
        for text in reversed(texts):
            ending.callback(text._end)


@dataclass(frozen=True)
class CachedText:
    """The ids `(n,)` of a text as far as they are cached, their keys and values, and the state of
    the model that computed them."""

    ids: np.ndarray
    entries: RowEntries
    state: tuple[Any, ...]


class Prefixes:
    """Texts that have ended and stay cached, the latest of up to so many tokens in all."""

    def __init__(self, tokens: int) -> None:
        self._most = tokens
        self._kept: deque[CachedText] = deque()

    def keep(self, text: CachedText) -> None:
        if not 0 < len(text.ids) <= self._most:  # a longer one would take the place of all others
            return
        self._kept.append(text)
        while sum(len(each.ids) for each in self._kept) > self._most:
            self._kept.popleft()

    def longest(
        self, ids: np.ndarray, state: tuple[Any, ...], running: Sequence[CachedText]
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], int]:
        """The keys and values `(1, heads, n, head_dim)` of each layer of the longest prefix that a
        prompt has in common with a kept or a `running` text, and its length n; the last token of
        the prompt is no part of it."""
        if self._most == 0:
            return [], 0
        found = [each for each in (*self._kept, *running) if each.state == state]
        lengths = [_common_length(ids[:-1], each.ids) for each in found]
        longest = max(lengths, default=0)
        if longest < _LEAST_SHARED:
            return [], 0
        return found[lengths.index(longest)].entries.first(longest), longest


def _state(model: PreTrainedModel) -> tuple[Any, ...]:
    """What keys and values depend on beside the ids: it changes with the weights and whatever else
    can change logits."""
    versions = [
        (each.data_ptr(), 0 if each.is_inference() else each._version)
        for each in model.parameters()
    ]
    return facts_about_state(model).setdefault("identity", object()), tuple(versions)


def _counts(model_kwargs: dict[str, Any]) -> bool:
    """Whether the positions of a prompt are 0, 1, 2 and so on."""
    positions = model_kwargs["position_ids"]
    return bool((positions == torch.arange(positions.shape[-1], device=positions.device)).all())


def default_rows(model: PreTrainedModel) -> int:
    """How many texts a running batch decodes at once, see [`RunningBatch`]."""
    config, device = text_config(model), model.device
    queries = _size(config, "num_attention_heads") or 1
    heads = _size(config, "num_key_value_heads") or queries
    head_dim = _size(config, "head_dim") or (_size(config, "hidden_size") or 4096) // queries
    layers = _size(config, "num_hidden_layers") or 32
    token = 2 * layers * heads * head_dim * model.dtype.itemsize  # bytes
    if device.type == "cuda":
        free, most = torch.cuda.mem_get_info(device)[0], 64
    else:
        free, most = psutil.virtual_memory().available, 16 if device.type == "cpu" else 64
    tokens = min(context_length(config) or _ROW_TOKENS, _ROW_TOKENS)
    return max(1, min(most, free // 2 // (tokens * token)))


def _size(config: Any, name: str) -> int | None:
    """A size of a model; `None` where it has none, or layers differ in it (Gemma 4)."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:
        return None
    return value if isinstance(value, int) else None


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    count = min(len(a), len(b))
    differ = a[:count] != b[:count]
    return int(differ.argmax()) if differ.any() else count


def _can_be_packed(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    return (
        PackedVerifier.supports(model, model_kwargs)
        and known_finding(PackedVerifier, model, PackedVerifier.fewest_rows, model_kwargs).exact
    )
