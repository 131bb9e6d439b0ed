"""Plain decoding in place of drafts: why a call needs it, and the call itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from transformers import StaticCache
from transformers.generation import GenerateDecoderOnlyOutput

from ..drafting.calls import remember_outputs
from ..drafting.contract import Drafter, Observation
from ..text_config import attends_locally, text_config
from ..transformers_names import CACHE_NAMES, ends_and_padding, transformers_loop
from ..verification.caches import find_cache
from .batch import fits_single_rows
from .request import Request

logger = logging.getLogger("hf_refspec")


def why_plain(request: Request) -> str | None:
    """Why drafts could change the text of a call, if they could."""
    kwargs = request.model_kwargs
    if kwargs.get("output_attentions"):
        return "`output_attentions=True` may change how the model attends; leave it out"
    rows = len(request.input_ids)
    for processor in request.logits_processor if rows > 1 else ():
        if not fits_single_rows(processor, rows):
            return (
                f"a {type(processor).__name__} may know the {rows} rows by their number, and rows "
                "with drafts differ in length; pass one prompt at a time"
            )
    is_static = isinstance(find_cache(kwargs), StaticCache)
    mask = kwargs.get("attention_mask") if attends_locally(text_config(request.model)) else None
    if is_static and mask is not None and mask.ndim == 2 and not bool(mask[:, -1].all()):
        return (
            "a prompt is padded on the right, and attention to nothing but padding depends on the "
            "length of the static cache; pad on the left"
        )
    return None


def log_plain(request: Request, why: str) -> None:
    """Warns that a call decodes plainly."""
    name = type(request.model).__name__
    logger.warning("%s decodes plainly, with the same text and no speed-up: %s.", name, why)


def decode_plainly(
    request: Request, drafters: Sequence[Drafter], why: str
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Plain decoding by transformers itself; the drafters observe its tokens."""
    log_plain(request, why)
    stats = drafters[0].stats
    stats.reason = why
    stats.verification = "none"
    kwargs = request.model_kwargs
    if request.adds_cache:
        request.generation_config.use_cache = False
        others = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}
        kwargs = {**others, "use_cache": False}
    output = transformers_loop(
        request.model,
        request.input_ids,
        logits_processor=request.logits_processor,
        stopping_criteria=request.stopping_criteria,
        generation_config=request.generation_config,
        streamer=request.streamer,
        **kwargs,
    )
    ids = output if isinstance(output, torch.Tensor) else output.sequences
    new_ids = ids[:, request.prompt_length :].numpy(force=True).astype(np.int64)
    emitted = [_without_padding(row, request) for row in new_ids]
    for column in range(new_ids.shape[1]):
        stats.record_rows([(0, 0) for tokens in emitted if column < len(tokens)])
    remember_outputs(stats, drafters, [tokens.tolist() for tokens in emitted])
    for drafter, tokens in zip(drafters, emitted, strict=True):
        for token in tokens:
            drafter.observe(Observation(token[None]))
    return output


def _without_padding(new_ids: np.ndarray, request: Request) -> np.ndarray:
    """The new ids of a row without the padding behind the end of one that ended early."""
    eos, pad = ends_and_padding(request.generation_config)
    if len(request.input_ids) == 1 or eos is None or pad is None:
        return new_ids
    ends = np.flatnonzero(np.isin(new_ids, eos.numpy(force=True)))
    if len(ends):
        return new_ids[: ends[0] + 1]
    return new_ids[: np.flatnonzero(new_ids != int(pad)).max(initial=-1) + 1]  # another criterion
