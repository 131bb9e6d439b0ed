"""Iterative RaLM: generation that retrieves a passage every few tokens (RaLMSpec, section 2).

The model's input is a passage, the prompt and the output; the next passage replaces the earlier
one. The caches of the last few contexts stay, and the caches of passages also for later calls. The
model computes the same with speculation and without: a passage is always a pass of its own, the
rest follows in passes that depend only on the earlier passages, and undoing a step restores every
cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import numpy as np
import torch
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

from ..drafting.blend import as_drafter
from ..drafting.calls import drafter_call, remember_outputs
from ..drafting.contract import Drafter, Observation
from ..generation.budget import make_budget
from ..generation.loop import Loop
from ..generation.plan import DraftLimits
from ..generation.row import Row, RowMark
from ..kernels.compilation import drafting_kernels
from ..messages import check_count
from ..refusals import FURTHER_OUTPUTS
from ..retrieval.knowledge_base import KnowledgeBase
from ..retrieval.retriever import Retrieved, Retriever
from ..text_config import (
    context_length,
    length_dependent_rope,
    text_config,
    text_tokenizer,
    vocab_size_of,
)
from ..transformers_names import (
    CACHE_NAME,
    CACHE_NAMES,
    belongs_to_caller,
    cache_name,
    decoder_output,
)
from ..verification.caches import find_cache, fresh_kwargs
from ..verification.model_memo import memo_of, state_of
from ..verification.passes import FixedTokens, run_prompts
from ..verification.probe import select_verifier
from ..verification.verifier import CHAIN, PLAIN, TREE, Kind, Verifier
from .checked_search import RalmError, call
from .options import RalmSpeculation
from .run import RowText, checked_speculation
from .stats import RalmStats

# Passages whose caches are kept: more of them save prefills, and take memory.
_PASSAGES = 8
# Arguments that `generate` prepares, and that are prepared anew for each passage.
_PREPARED = {"attention_mask", "position_ids", "use_cache", "logits_to_keep"}
_PREPARED |= {*CACHE_NAMES, *FURTHER_OUTPUTS}
# The size of all passages: a quarter of the weights' bytes, but at least 43 passages of 256 tokens
# with a model of 135M parameters in float32; on a GPU at most a quarter of its free memory.
FRACTION = 0.25
LEAST_BYTES = 1 << 29


@torch.no_grad()
def iterative_ralm(  # noqa: D417
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    retriever: Retriever,
    tokenizer: PreTrainedTokenizerBase | None = None,
    generation_stride: int = 4,
    query_length: int = 32,
    speculation: str | RalmSpeculation | None = "psa",
    drafter: Drafter | None = None,
    ralm_stats: RalmStats | None = None,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Retrieval-augmented generation for `model.generate(..., custom_generate=rs.iterative_ralm)`.

    Every few tokens, the last tokens of prompt and output retrieve the best passage, which replaces
    the earlier one before the prompt (after its BOS token). The ids are the same with every
    `speculation`, and only verified tokens are streamed. Keys and values of passages stay at the
    model for later calls, up to a quarter of the weights' bytes or 512 MiB, whichever is more, and
    on a GPU no more than a quarter of the free memory; they go when its weights change, unless only
    parts of a parameter's `data` are written. Logits processors and stopping criteria must depend
    on the ids alone: they are asked again about text that was rolled back.
    `generate` prepares all arguments but these:

    Args:
        retriever ([`Retriever`]): Finds the passages, in tokens of the model. A passage that is too
            long for the context is cut at its end.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The model's, needed for `stop_strings`.
            Without it the generation config tells which token is BOS.
        generation_stride (`int`, *optional*, defaults to 4): Tokens between two retrievals.
        query_length (`int`, *optional*, defaults to 32): The last tokens that form a query.
        speculation (`str`, `RalmSpeculation`, *optional*, defaults to `"psa"`): See
            [`RalmSpeculation.parse`]; `None` for the baseline, which waits for every retrieval.
        drafter ([`Drafter`], *optional*): Drafts tokens from the passage, the prompt and the output
            within a step, [`ReferenceCopy`] for example. The ids stay the same.
        ralm_stats ([`RalmStats`], *optional*): Receives counts and times.

    Returns:
        The output of `generate`, without any passage: ids `(1, length)`, or a
        `GenerateDecoderOnlyOutput` that has no cache.

    Raises:
        ValueError: If an argument is invalid or not supported, or there is no room for a passage.
        RalmError: If the retriever fails, with the text so far.
    """
    speculation = checked_speculation(
        model,
        input_ids,
        logits_processor,
        generation_config,
        model_kwargs,
        speculation,
        "iterative_ralm",
    )
    _check_prepared(model_kwargs)
    check_count("generation_stride", generation_stride)
    check_count("query_length", query_length)
    drafts = drafter is not None and drafting_kernels.ready()  # or being compiled
    drafter = as_drafter(drafter if drafts else Drafter(), "`drafter`")
    vocab_size = vocab_size_of(model)
    base = getattr(retriever, "knowledge_base", None)
    if isinstance(base, KnowledgeBase):
        base.check(vocab_size)
    prompt = input_ids[0].numpy(force=True).astype(np.int64)
    mask = model_kwargs.get("attention_mask")
    if mask is not None:
        prompt = prompt[mask[0].numpy(force=True) != 0]  # without padding
    names_bos = generation_config if tokenizer is None else text_tokenizer(tokenizer)
    bos = names_bos.bos_token_id
    row = Row(input_ids, logits_processor, stopping_criteria, generation_config, drafter=drafter)
    text = IterativeText(
        row=row,
        streamer=streamer,
        model=model,
        generation_config=generation_config,
        model_kwargs=model_kwargs,
        retriever=retriever,
        passage_room=_room_for_passages(model, row),
        prompt=prompt,
        has_bos=len(prompt) > 0 and prompt[0] in np.atleast_1d(np.array(bos)),
        drafts=drafts,
        stride=generation_stride,
        query_length=query_length,
    )
    with drafter_call(drafter, [prompt], vocab_size, memo=memo_of(model)):
        text.generate(retriever, speculation, 1, ralm_stats)
        # A session cache remembers the whole text without passages.
        drafter.begin(prompt, vocab_size)
        drafter.observe(Observation(np.array(row.output, dtype=np.int64)))
        remember_outputs(drafter.stats, [drafter], [row.output])
    if not generation_config.return_dict_in_generate:
        return row.ids
    return decoder_output(row.ids, None, row.scores, row.logits)


def _room_for_passages(model: PreTrainedModel, row: Row) -> int | None:
    """The most tokens that a passage may have, `None` if the model sets no limit."""
    longest = context_length(model)
    if longest is None or row.max_length is None:
        return None
    room = longest - row.max_length
    if room < 1:
        raise ValueError(
            f"There is no room for a passage: {type(model).__name__} takes {longest} tokens, of "
            f"which the prompt ({len(row)}) and its continuation may have {row.max_length} "
            "(`max_length`). Lower `max_new_tokens`, or shorten the prompt."
        )
    return room


def _check_prepared(model_kwargs: dict[str, Any]) -> None:
    """Refuses arguments that describe the prompt alone."""
    wrong = [k for k, value in model_kwargs.items() if value is not None and k not in _PREPARED]
    wrong += [CACHE_NAME] * belongs_to_caller(find_cache(model_kwargs))
    if wrong:
        raise ValueError(
            f"`{wrong[0]}` cannot be combined with `iterative_ralm`: it describes the prompt "
            "alone, and passages come before it. Leave it out."
        )


@dataclass(eq=False)
class Context:
    """The model's input in place of the row, see [`Row.seen`]: passage, prompt and output."""

    prefix: torch.Tensor  # passage and prompt, (1, p)
    verifier: Verifier
    limits: DraftLimits
    _row: Row

    @property
    def ids(self) -> torch.Tensor:
        """All tokens, int64 of shape `(1, length)`."""
        prompt_length = len(self._row) - len(self._row.output)
        return torch.cat([self.prefix, self._row.ids[:, prompt_length:]], dim=-1)

    def tail(self, count: int) -> np.ndarray:
        """The last `count` tokens on the host, int64 of shape `(count,)`."""
        if count <= len(self._row.output):
            return self._row.tail(count)
        return FixedTokens(self.ids).tail(count)

    def __len__(self) -> int:
        return self.prefix.shape[1] + len(self._row.output)


@dataclass(slots=True, eq=False)
class IterativeStep:
    """The tokens that follow one passage, and the state before them."""

    passage: np.ndarray  # int64, (n,)
    end: int  # the length of the text after it
    before: RowMark
    contexts: OrderedDict[bytes, Context]  # kept before it
    restore: Callable[[], None] | None  # restores the cache of its context, if that was among them


@dataclass
class IterativeText(RowText):
    """The text of one call, with contexts for the last few passages."""

    model: PreTrainedModel
    generation_config: GenerationConfig
    model_kwargs: dict[str, Any]
    retriever: Retriever
    passage_room: int | None  # tokens, no limit if `None`
    prompt: np.ndarray  # int64, (n,), without padding
    has_bos: bool  # whether passages come after the prompt's first token
    drafts: bool
    stride: int
    query_length: int
    _kind: Kind = field(init=False, default=PLAIN)  # of all contexts' verifiers
    _rounds_prompts: bool = field(init=False, default=False)
    _loop: Loop | None = field(init=False, default=None)  # the first context's
    _contexts: OrderedDict[bytes, Context] = field(init=False, default_factory=OrderedDict)
    _passages: dict[int, np.ndarray] = field(init=False, default_factory=dict)  # by id
    _unverified: list[IterativeStep] = field(init=False, default_factory=list)
    # The context that the drafter has observed, and the text's length by then. It begins anew after
    # another passage, and where the text was rolled back.
    _observed: tuple[Context, int] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._entries = PassageEntries.for_model(self.model)
        config = text_config(self.model)
        if find_cache(self.model_kwargs) is not None and not length_dependent_rope(config):
            verifier = select_verifier(
                self.model, "auto", 1, self.generation_config, self.model_kwargs
            ).verifier
            if verifier is not None:
                self._kind, self._rounds_prompts = verifier.kind, verifier.rounds_prompts

    def query(self) -> Any:
        """The retriever's query for the last tokens of prompt and output."""
        last = self.row.tail(min(self.query_length, len(self.row.output)))
        ids = np.concatenate([self.prompt, last])[-self.query_length :]
        return call(self.retriever, "encode", ids)

    def step(self, found: Retrieved) -> IterativeStep:
        """Generates `stride` tokens after the best passage."""
        row = self.row
        passage = self._passage(int(found.ids[0]))
        end = len(row) + self.stride
        before = row.mark()
        earlier = self._contexts.copy()
        context = self._contexts.pop(passage.tobytes(), None)
        restore = None if context is None else context.verifier.mark()
        if context is None:
            context = self._new_context(passage)
        self._contexts[passage.tobytes()] = context
        if len(self._contexts) > _PASSAGES:
            self._contexts.popitem(last=False)
        row.go_on_in(context, end)
        self._generate(context, end)
        step = IterativeStep(passage, len(row), before, earlier, restore)
        self._unverified.append(step)
        self._observed = (context, step.end)
        return step

    def agrees(self, step: IterativeStep, truth: Retrieved) -> bool:
        """True if the best passage is the step's; two passages may be the same text."""
        return np.array_equal(step.passage, self._passage(int(truth.ids[0])))

    def roll_back(self, step: IterativeStep) -> None:
        """Undoes a step and all later ones."""
        while step in self._unverified:
            last = self._unverified.pop()
            self._contexts = last.contexts.copy()
            if last.restore is not None:
                last.restore()
            self.row.roll_back(last.before)
        self._observed = None

    def commit(self, steps: Sequence[IterativeStep]) -> None:
        """Streams verified steps, which are not undone any more."""
        del self._unverified[: len(steps)]
        super().commit(steps)

    def _generate(self, context: Context, end: int) -> None:
        """Generates up to a length of the text in the context of a passage."""
        row = self.row
        verifier = context.verifier
        drafter = row.drafter
        if self._observed != (context, len(row)):
            ids = context.ids[0].numpy(force=True).astype(np.int64)
            drafter.begin(ids, vocab_size_of(self.model))
        if self._loop is None:
            nodes = "auto" if self.drafts and self._kind is not PLAIN else 0
            budget = make_budget(nodes, drafter, verifier)
            self._loop = Loop(verifier, budget, context.limits, drafter.stats)
        # The costs that it has learned stay.
        loop = replace(self._loop, verifier=verifier, limits=context.limits)
        while row.stopped_at is None and len(row) < end:
            if verifier.cached:
                loop.step([row])
            else:
                loop.prefill([row])

    def _passage(self, passage_id: int) -> np.ndarray:
        """The tokens of a passage, int64 of shape `(n,)`, as far as there is room for them."""
        if passage_id in self._passages:
            return self._passages[passage_id]
        tokens = np.asarray(call(self.retriever, "passage", passage_id))
        name = f"{type(self.retriever).__name__}.passage({passage_id})"
        vocab_size = vocab_size_of(self.model)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise RalmError(
                f"{name} has ids from {tokens.min()} to {tokens.max()}, but the model's vocabulary "
                f"has {vocab_size} tokens. Was the knowledge base built with another tokenizer?"
            )
        self._passages[passage_id] = tokens[: self.passage_room].astype(np.int64)
        return self._passages[passage_id]

    def _new_context(self, passage: np.ndarray) -> Context:
        """The context of a passage, int64 of shape `(n,)`, with what is kept of it."""
        before, after = np.split(self.prompt, [int(self.has_bos)])
        prefix = torch.from_numpy(np.concatenate([before, passage, after]))[None]
        prefix = prefix.to(self.row.ids.device)
        kwargs = self.model_kwargs
        if find_cache(kwargs) is not None:
            mask = prefix.new_ones((1, prefix.shape[1] + len(self.row.output)))
            kwargs = fresh_kwargs(self.model, kwargs, mask)
            # The prefill needs a token after the passage.
            length = min(len(before) + len(passage), mask.shape[1] - 1)
            if length and self._kind in (TREE, CHAIN):
                kwargs[cache_name(kwargs)] = self._read(prefix[:, :length])
                # Its length shows that the ids include the cached ones.
                kwargs["attention_mask"] = mask
        verifier = Verifier(
            self._kind, self.model, self.generation_config, kwargs, self._rounds_prompts
        )
        return Context(prefix, verifier, DraftLimits(verifier), self.row)

    def _read(self, ids: torch.Tensor) -> Cache:
        """A cache that holds the ids `(1, n)` of a passage, which run unless they are kept."""
        key = ids.numpy(force=True).tobytes()
        cache = self._entries.get(key)
        if cache is None:
            kwargs = fresh_kwargs(self.model, self.model_kwargs, torch.ones_like(ids))
            config = self.generation_config
            outputs = run_prompts(self.model, ids, config, kwargs, self._rounds_prompts)
            cache = find_cache({**kwargs, **outputs})  # some models return none
            assert cache is not None
            self._entries.add(key, cache)
        return deepcopy(cache)


class PassageEntries:
    """The caches of passages that one state of a model has read, up to `max_bytes`.

    The least recently used are dropped first. A passage comes first in the model's input, so that
    its keys and values depend on nothing else."""

    def __init__(self, model_state: tuple[Any, ...], max_bytes: int) -> None:
        self.bytes = 0  # of all keys and values that are kept
        self._model_state = model_state
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, tuple[Cache, int]] = OrderedDict()  # oldest first
        self._lock = Lock()

    @classmethod
    def for_model(cls, model: PreTrainedModel) -> PassageEntries:
        """The passages kept at `model`; dropped when its weights or its hooks change."""
        memo = memo_of(model)
        state = state_of(model)
        entries = memo.get(cls)
        if entries is None or entries._model_state != state:
            weights = sum(parameter.nbytes for parameter in model.parameters())
            max_bytes = max(LEAST_BYTES, int(FRACTION * weights))
            if model.device.type == "cuda":
                free_bytes = torch.cuda.mem_get_info(model.device)[0]
                max_bytes = min(max_bytes, int(FRACTION * free_bytes))
            entries = memo[cls] = cls(state, max_bytes)
        return entries

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, tokens: bytes) -> Cache | None:
        """The cache of a passage with these tokens, if it is kept. Passes need a copy of it."""
        with self._lock:
            if tokens not in self._kept:
                return None
            self._kept.move_to_end(tokens)
            return self._kept[tokens][0]

    def add(self, tokens: bytes, cache: Cache) -> None:
        """Keeps the cache of a passage, unless it is larger than all may be together."""
        size = sum(
            value.untyped_storage().nbytes()
            for layer in cache.layers
            for value in vars(layer).values()
            if isinstance(value, torch.Tensor)
        )
        if size > self._max_bytes:
            return
        with self._lock:
            _, replaced = self._kept.pop(tokens, (None, 0))  # another thread has read it as well
            self._kept[tokens] = cache, size
            self.bytes += size - replaced
            while self.bytes > self._max_bytes:
                _, (_, dropped) = self._kept.popitem(last=False)
                self.bytes -= dropped
