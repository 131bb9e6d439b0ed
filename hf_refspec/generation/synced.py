"""`synced_gpus`: processes that decode texts of their own with weights that are split over them.

With ZeRO-3 and FSDP each forward pass collects the weights of every layer from all processes, so
that none may run one pass more than the others. How many a call needs depends on what is accepted.
Before each pass of any kind (prefill, probe, draft) a process says that it runs one; one whose call
has ended runs passes with them whose result is dropped, until all have ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel


def is_synced(model: PreTrainedModel, synced_gpus: bool | None) -> bool:
    """Whether `generate` keeps processes in step, which transformers decides where `synced_gpus`
    is `None`."""
    return bool(
        model._extract_generation_mode_kwargs(None, {}, synced_gpus, None, None)["synced_gpus"]
    )


@contextmanager
def kept_in_step(model: PreTrainedModel, input_ids: torch.Tensor) -> Iterator[None]:
    """Around a call, in every process at the same time.

    Args:
        model (`PreTrainedModel`): The target model.
        input_ids (`torch.LongTensor` of shape `(R, length)`): Any text, for passes whose result is
            dropped.
    """

    def run_one(*_: Any) -> None:
        model._has_unfinished_sequences(False, True, input_ids.device)

    vars(run_one)["only_reads"] = True  # what is known of the model's logits stays true
    # Before the hook of FSDP, which begins to collect weights.
    hook = model.register_forward_pre_hook(run_one, prepend=True)
    try:
        yield
    finally:
        hook.remove()
        while model._has_unfinished_sequences(True, True, input_ids.device):
            model(input_ids=input_ids[:1, -1:], use_cache=False)
