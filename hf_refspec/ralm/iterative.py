"""Iterative RaLM: generation that retrieves a passage every few tokens (RaLMSpec, section 2).

The passage stands before the prompt, in place of the one before it. With speculation the passage
comes from the request cache, see `engine.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput

from ..drafting.drafter import Drafter, check_count
from ..drafting.tree import DraftTree
from ..generation.budget import Budget, make_budget
from ..generation.entry_point import entry_point
from ..generation.loop import Loop
from ..generation.row import Row, RowMark
from ..generation.validation import check_model, check_request
from ..index.retrieved import Retrieved
from ..retrieval.retriever import Retriever
from ..verification.cache import find_cache
from ..verification.positions import embedded_positions
from ..verification.reach import Reach
from .checked_search import RetrievalError, call_with_retry
from .engine import generate_speculatively
from .options import Speculation
from .passage_contexts import Context, ContextChange, PassageContexts
from .stats import RetrievalStats

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

# What `generate` prepares, and is made anew for each passage.
_PREPARED = (
    "attention_mask",
    "position_ids",
    "past_key_values",
    "cache_params",
    "use_cache",
    "logits_to_keep",
)


@entry_point("streamer", "tokenizer")
@torch.no_grad()
def iterative_ralm(
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
    speculation: str | Speculation | None = "psa",
    drafter: Drafter | None = None,
    retrieval_stats: RetrievalStats | None = None,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Retrieval-augmented generation for
    `model.generate(..., custom_generate=hf_refspec.iterative_ralm, retriever=retriever)`.

    Every few tokens, the last tokens of prompt and output retrieve the best passage, which stands
    before the prompt (behind its BOS token) in place of the last one. The ids are the same with
    every `speculation`; what is streamed is verified. `generate` prepares all arguments but these:

    Args:
        retriever ([`Retriever`]): Where the passages come from. Their ids are those of the model's
            tokenizer. A passage that is too long for the context is cut at its end.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The model's. It says which token is BOS,
            which the generation config says otherwise; `stop_strings` need it.
        generation_stride (`int`, *optional*, defaults to 4): Tokens between two retrievals.
        query_length (`int`, *optional*, defaults to 32): The last tokens that a query is made of.
        speculation (`str`, `Speculation`, *optional*, defaults to `"psa"`): See
            [`Speculation.parse`]; `None` for the baseline, which waits for every retrieval.
        drafter ([`Drafter`], *optional*): Drafts tokens from the passage, the prompt and the output
            within a step, [`ReferenceCopy`] for example. Fewer forward passes, the same ids.
        retrieval_stats ([`RetrievalStats`], *optional*): Is filled with what was retrieved and how
            long it took.

    Returns:
        What `generate` returns, without any passage: ids `(1, length)`, or a
        `GenerateDecoderOnlyOutput` that has no cache.

    Logits processors and stopping criteria must go by the ids alone: what is rolled back they are
    asked again.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an argument asks for what cannot be done, or there is no room for a passage.
        RetrievalError: If the retriever fails, with the text so far.
    """
    speculation = Speculation.parse(speculation)
    _check_options(retriever, generation_stride, query_length, drafter, retrieval_stats)
    _check_request(model, input_ids, generation_config, model_kwargs)
    row = Row(input_ids, logits_processor, stopping_criteria, generation_config)
    room = _room_for_passages(model, row)
    prompt = _unpadded(input_ids, model_kwargs.get("attention_mask"))
    bos = generation_config.bos_token_id if tokenizer is None else tokenizer.bos_token_id
    begin = int(len(prompt) > 0 and prompt[0] in np.atleast_1d(np.array(bos)))
    contexts = PassageContexts(
        model, generation_config, model_kwargs, row, prompt[:begin], prompt[begin:]
    )
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    with ExitStack() as call:
        if drafter is not None:
            call.enter_context(drafter.session(prompt, vocab_size))
        if streamer is not None:
            streamer.put(input_ids.cpu())
        text = IterativeText(
            row,
            contexts,
            Passages(retriever, room, vocab_size),
            PassageLoop(model, contexts, model_kwargs, drafter),
            prompt,
            generation_stride,
            query_length,
            streamer,
        )
        try:
            generate_speculatively(text, retriever, speculation, k=1, stats=retrieval_stats)
        except RetrievalError as error:
            error.text_ids = row.ids[0].tolist()
            raise
        if drafter is not None:  # is told what the call has come to before it ends
            drafter.begin(prompt, vocab_size)
            drafter.observe(np.array(row.output, dtype=np.int64), DraftTree.empty(), None)
    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return row.ids
    return GenerateDecoderOnlyOutput(sequences=row.ids, scores=row.scores, logits=row.logits)


class Passages:
    """The passages of one call, cut to the room that there is (no limit if it is `None`)."""

    def __init__(self, retriever: Retriever, room: int | None, vocab_size: int) -> None:
        self.retriever = retriever
        self._room = room
        self._vocab_size = vocab_size
        self._tokens: dict[int, np.ndarray] = {}

    def __getitem__(self, passage_id: int) -> np.ndarray:
        """The tokens of a passage, int64.

        Raises:
            RetrievalError: If the retriever does not know it, or if these are no tokens of the
                model.
        """
        if passage_id not in self._tokens:
            tokens = np.asarray(call_with_retry(self.retriever, "passage", passage_id))
            self._check(passage_id, tokens)
            self._tokens[passage_id] = tokens[: self._room].astype(np.int64)
        return self._tokens[passage_id]

    def _check(self, passage_id: int, tokens: np.ndarray) -> None:
        name = f"{type(self.retriever).__name__}.passage({passage_id})"
        if tokens.ndim != 1 or (len(tokens) and not np.issubdtype(tokens.dtype, np.integer)):
            raise RetrievalError(
                f"{name} must be the ids of its tokens, a 1-D array of integers, but has the shape "
                f"{tokens.shape} and the dtype {tokens.dtype}."
            )
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            raise RetrievalError(
                f"{name} has ids from {tokens.min()} to {tokens.max()}, but the model's vocabulary "
                f"has {self._vocab_size} tokens. Was the knowledge base built with another "
                "tokenizer?"
            )


class PassageLoop:
    """Decodes a row behind a passage, with drafts from the passage, the prompt and the output.

    Where the text goes on behind another passage, or after something else than what the drafter was
    told, the drafter begins anew.

    Args:
        model (`PreTrainedModel`): The target model.
        contexts ([`PassageContexts`]): They say how drafts are verified.
        model_kwargs (`dict`): Keyword arguments of the forward pass.
        drafter ([`Drafter`], *optional*): What drafts, in a session of this call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        contexts: PassageContexts,
        model_kwargs: dict[str, Any],
        drafter: Drafter | None,
    ) -> None:
        kind = contexts.kind
        self._drafter = Drafter() if drafter is None else drafter
        self._vocab_size = model.config.get_text_config(decoder=True).vocab_size
        self._budget = Budget(0)
        if drafter is not None and kind.continues:
            self._budget = make_budget("auto", drafter, model, kind.name)
        self._reach = Reach(kind, model, 1, model_kwargs)
        self._chains = not kind.takes_trees
        # Where the drafter has been told of everything, and how long that was.
        self._told: tuple[Context, int] | None = None

    def run(self, row: Row, context: Context, end: int) -> None:
        """Decodes until the row is `end` tokens long, or has ended."""
        row.seen = context
        row.draft_end = end if row.max_length is None else min(end, row.max_length)
        context.prefill()
        if self._told != (context, len(row)):
            ids = context.ids[0].numpy(force=True).astype(np.int64)
            self._drafter.begin(ids, self._vocab_size)
        loop = Loop(context.verifier, self._budget, self._reach, self._drafter.stats, self._chains)
        while not row.finished and len(row) < end:
            if context.verifier.cached:
                loop.step([row], [self._drafter], [True])
            else:
                loop.prefill([row], [self._drafter])
        self._told = (context, len(row))

    def roll_back(self) -> None:
        """Is told that the text has gone back."""
        self._told = None


@dataclass(slots=True, eq=False)
class IterativeStep:
    """The tokens behind one passage, and what it takes to go back to before them."""

    passage: np.ndarray
    before: RowMark
    change: ContextChange
    end: int  # the length of the text after it


@dataclass
class IterativeText:
    """The text of one call, see [`RetrievalAugmentedGeneration`].

    Attributes:
        row ([`Row`]): Prompt and output.
        contexts ([`PassageContexts`]): What the model sees of it.
        passages ([`Passages`]): What is retrieved.
        loop ([`PassageLoop`]): Decodes.
        prompt (`np.ndarray`, int64): The prompt without padding.
        stride (`int`): The tokens of a step.
        query_length (`int`): The tokens of a query.
        streamer (`BaseStreamer`, *optional*): Gets each token once it is verified.
    """

    row: Row
    contexts: PassageContexts
    passages: Passages
    loop: PassageLoop
    prompt: np.ndarray
    stride: int
    query_length: int
    streamer: BaseStreamer | None
    _unverified: list[IterativeStep] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.row.finished

    def query(self) -> Any:
        last = self.row.tail(min(self.query_length, len(self.row.output)))
        ids = np.concatenate([self.prompt, last])[-self.query_length :]
        return call_with_retry(self.passages.retriever, "encode", ids)

    def step(self, found: Retrieved) -> IterativeStep:
        passage = self.passages[int(found.ids[0])]
        before = self.row.mark()
        context, change = self.contexts.enter(passage)
        step = IterativeStep(passage, before, change, end=len(self.row) + self.stride)
        self._unverified.append(step)
        self.loop.run(self.row, context, step.end)
        step.end = len(self.row)
        return step

    def agrees(self, step: IterativeStep, truth: Retrieved) -> bool:
        # Two passages may be the same text.
        return np.array_equal(step.passage, self.passages[int(truth.ids[0])])

    def roll_back(self, step: IterativeStep) -> None:
        while step in self._unverified:
            last = self._unverified.pop()
            self.contexts.undo(last.change)
            self.row.roll_back(last.before)
        self.loop.roll_back()

    def commit(self, steps: Sequence[IterativeStep]) -> None:
        if not steps:
            return
        del self._unverified[: len(steps)]
        if self.streamer is not None:
            for token in self.row.ids[0, steps[0].before.length : steps[-1].end].cpu():
                self.streamer.put(token[None])


def _unpadded(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> np.ndarray:
    """The tokens of the prompt that the model sees."""
    ids = input_ids[0].numpy(force=True).astype(np.int64)
    return ids if attention_mask is None else ids[attention_mask[0].numpy(force=True) != 0]


def _room_for_passages(model: PreTrainedModel, row: Row) -> int | None:
    """The most tokens that a passage may have, `None` where the model sets no limit.

    Raises:
        ValueError: If there is no room for one.
    """
    context_length = embedded_positions(model.config.get_text_config(decoder=True))
    if context_length is None or row.max_length is None:
        return None
    room = context_length - row.max_length
    if room < 1:
        raise ValueError(
            f"There is no room for a passage: {type(model).__name__} takes {context_length} "
            f"tokens, of which the prompt and its continuation may have {row.max_length} "
            f"(`max_length`; the prompt has {len(row)}). Lower `max_new_tokens`, or shorten the "
            "prompt."
        )
    return room


def _check_options(
    retriever: Any,
    generation_stride: Any,
    query_length: Any,
    drafter: Any,
    retrieval_stats: Any,
) -> None:
    if not isinstance(retriever, Retriever) or isinstance(retriever, type):
        raise TypeError(
            "`retriever` must have the methods of `hf_refspec.Retriever` (encode, search, score, "
            f"passage), as `hf_refspec.DenseRetriever(...)` does, but is {retriever!r}."
        )
    check_count("generation_stride", generation_stride)
    check_count("query_length", query_length)
    if drafter is not None and not isinstance(drafter, Drafter):
        raise TypeError(
            "`drafter` must be a drafter of hf_refspec, `hf_refspec.ReferenceCopy()` for example, "
            f"or None, but is {drafter!r}."
        )
    if retrieval_stats is not None and not isinstance(retrieval_stats, RetrievalStats):
        raise TypeError(
            "`retrieval_stats` must be a `hf_refspec.RetrievalStats()` to be filled, or None, but "
            f"is {retrieval_stats!r}."
        )


def _check_request(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    check_model(model, "iterative_ralm")
    check_request(input_ids, generation_config, model_kwargs, "iterative_ralm")
    if len(input_ids) != 1:
        raise ValueError(
            f"`iterative_ralm` takes one prompt at a time, but `input_ids` has {len(input_ids)} "
            "rows: each would have passages of its own. Call `generate` for each."
        )
    if getattr(find_cache(model_kwargs), "_is_user_defined", False):
        raise ValueError(
            "`past_key_values` cannot be combined with `iterative_ralm`: passages stand before "
            "the prompt, so that each needs a cache of its own. Leave it out."
        )
    for name, value in model_kwargs.items():
        if value is not None and name not in _PREPARED:
            raise ValueError(
                f"`{name}` cannot be combined with `iterative_ralm`: it describes the prompt "
                "alone, and passages stand before it. Leave it out."
            )
