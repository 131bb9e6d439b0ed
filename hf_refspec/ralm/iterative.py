"""Iterative RaLM: generation that retrieves a passage every few tokens (RaLMSpec, section 2).

The passage stands before the prompt, and the next one takes its place. With speculation passages
come from the request cache, see `algorithm.py`; `iterative_text.py` has the text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

from ..check_count import check_count
from ..drafting.call_options import Sampling
from ..drafting.calls import drafter_call, remember_outputs
from ..drafting.candidates import as_drafter
from ..drafting.compilation import drafting_kernels
from ..drafting.drafter import Drafter
from ..drafting.observation import Observation
from ..generation.row import Row
from ..generation.validation import FURTHER_OUTPUTS
from ..retrieval.retriever import Retriever
from ..text_config import context_length, text_config
from ..transformers_names import CACHE_NAME, CACHE_NAMES, belongs_to_caller, decoder_output
from ..verification.caches import find_cache
from ..verification.model_memo import memo_of
from .iterative_text import IterativeText, Passages
from .options import RalmSpeculation
from .passage_contexts import PassageContexts
from .run import check_ralm_call, exact_speculation, generate_row
from .stats import RalmStats

# Arguments that `generate` prepares, and that are prepared anew for each passage.
_PREPARED = {"attention_mask", "position_ids", "use_cache", "logits_to_keep"}
_PREPARED |= {*CACHE_NAMES, *FURTHER_OUTPUTS}


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
    speculation: str | RalmSpeculation | None = "psa",
    drafter: Drafter | None = None,
    ralm_stats: RalmStats | None = None,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Retrieval-augmented generation for
    `model.generate(..., custom_generate=hf_refspec.iterative_ralm, retriever=retriever)`.

    Every few tokens, the last tokens of prompt and output retrieve the best passage, which takes
    the place of the earlier one before the prompt (behind its BOS token). The ids are the same with
    every `speculation`, and only verified tokens are streamed. Keys and values of passages stay at
    the model for later calls, up to a quarter of the weights' bytes or 512 MiB, whichever is more,
    and on a GPU no more than a quarter of the free memory.
    `generate` prepares all arguments but these:

    Args:
        retriever ([`Retriever`]): Finds the passages, whose tokens are those of the model's
            tokenizer. A passage that is too long for the context is cut at its end.
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

    Logits processors and stopping criteria must depend on the ids alone: they are asked again about
    text that was rolled back.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an argument is invalid or not supported, or there is no room for a passage.
        RalmError: If the retriever fails, with the text so far.
    """
    speculation = exact_speculation(model, speculation)
    _check_options(retriever, generation_stride, query_length, drafter)
    drafts = drafter is not None and drafting_kernels.ready()
    if drafter is None or not drafts:  # the kernels are being compiled in the background
        drafter = Drafter()
    drafter = as_drafter(drafter, "`drafter`")
    check_ralm_call(model, input_ids, generation_config, model_kwargs, "iterative_ralm")
    _check_prepared(model_kwargs)
    row = Row(input_ids, logits_processor, stopping_criteria, generation_config)
    vocab_size = text_config(model).vocab_size
    passages = Passages(retriever, _room_for_passages(model, row), vocab_size)
    prompt = input_ids[0].numpy(force=True).astype(np.int64)
    mask = model_kwargs.get("attention_mask")
    if mask is not None:
        prompt = prompt[mask[0].numpy(force=True) != 0]  # without padding
    bos = generation_config.bos_token_id if tokenizer is None else tokenizer.bos_token_id
    begin = int(len(prompt) > 0 and prompt[0] in np.atleast_1d(np.array(bos)))
    contexts = PassageContexts(
        model, generation_config, model_kwargs, row, prompt[:begin], prompt[begin:]
    )
    text = IterativeText(
        row=row,
        contexts=contexts,
        passages=passages,
        drafter=drafter,
        max_draft_tokens="auto" if drafts and contexts.kind.takes_several_tokens else 0,
        prompt=prompt,
        stride=generation_stride,
        query_length=query_length,
        streamer=streamer,
    )
    with drafter_call(
        drafter,
        [prompt],
        vocab_size,
        sampling=Sampling.of(generation_config),
        memo=memo_of(model),
    ):
        generate_row(text, row, retriever, speculation, 1, ralm_stats, streamer)
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
            f"There is no room for a passage: {type(model).__name__} takes {longest} "
            f"tokens, of which the prompt and its continuation may have {row.max_length} "
            f"(`max_length`; the prompt has {len(row)}). Lower `max_new_tokens`, or shorten the "
            "prompt."
        )
    return room


def _check_options(retriever: Any, generation_stride: Any, query_length: Any, drafter: Any) -> None:
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


def _check_prepared(model_kwargs: dict[str, Any]) -> None:
    if belongs_to_caller(find_cache(model_kwargs)):
        raise ValueError(
            f"`{CACHE_NAME}` cannot be combined with `iterative_ralm`: each passage stands before "
            "the prompt and needs a cache of its own. Leave it out."
        )
    for name, value in model_kwargs.items():
        if value is not None and name not in _PREPARED:
            raise ValueError(
                f"`{name}` cannot be combined with `iterative_ralm`: it describes the prompt "
                "alone, and passages stand before it. Leave it out."
            )
