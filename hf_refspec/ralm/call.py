"""What a call of iterative RaLM and one of kNN-LM have in common."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import BaseStreamer

from ..generation.row import Row
from ..generation.validation import check_model, check_request
from ..retrieval.retriever import Retriever
from .checked_search import RetrievalError
from .engine import RetrievalAugmentedGeneration, generate_speculatively
from .options import Speculation
from .stats import RetrievalStats


def check_call(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    stats: Any,
    caller: str,
) -> None:
    """Refuses calls that `caller` cannot do, from the arguments as `generate` has prepared them."""
    if stats is not None and not isinstance(stats, RetrievalStats):
        raise TypeError(
            "`retrieval_stats` must be a `hf_refspec.RetrievalStats()` to be filled, or None, but "
            f"is {stats!r}."
        )
    check_model(model, caller)
    check_request(input_ids, generation_config, model_kwargs, caller)
    if len(input_ids) != 1:
        raise ValueError(
            f"`{caller}` continues one text, but `input_ids` has {len(input_ids)} rows. Pass one "
            "prompt at a time."
        )


def decode(
    text: RetrievalAugmentedGeneration,
    row: Row,
    retriever: Retriever,
    speculation: Speculation | None,
    k: int,
    stats: RetrievalStats | None,
    streamer: BaseStreamer | None,
    **sources: Any,
) -> None:
    """Generates a text; a `RetrievalError` carries the part of the row that is verified."""
    if streamer is not None:
        streamer.put(row.ids.cpu())
    try:
        generate_speculatively(text, retriever, speculation, k, **sources, stats=stats)
    except RetrievalError as error:
        error.text_ids = row.ids[0].tolist()
        raise
    if streamer is not None:
        streamer.end()
