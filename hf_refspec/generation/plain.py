"""Plain decoding in place of drafts, by transformers itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from transformers.generation import GenerateDecoderOnlyOutput

from ..drafting.calls import remember_outputs
from ..drafting.contract import Drafter, Observation
from ..refusals import Reason
from ..transformers_names import CACHE_NAMES, ends_and_padding, transformers_loop
from .request import Request

logger = logging.getLogger("hf_refspec")


def log_plain(request: Request, reason: Reason) -> None:
    """Warns that a call decodes plainly."""
    name = type(request.model).__name__
    logger.warning("%s decodes plainly, with the same text and no speed-up: %s.", name, reason.text)


def decode_plainly(
    request: Request, drafters: Sequence[Drafter], reason: Reason
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Plain decoding by transformers itself; the drafters observe its tokens."""
    log_plain(request, reason)
    stats = drafters[0].stats
    stats.reason = reason.text
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
