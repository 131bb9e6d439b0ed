"""Greedy texts of a running batch."""

import torch

from hf_refspec.generation.running_batch import RunningBatch
from hf_refspec.generation.running_text import RunningText

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def add(batch: RunningBatch, prompt: torch.Tensor, new_tokens: int = 9, **options) -> RunningText:
    """Lets a greedy text join."""
    return batch.add(input_ids=prompt, max_new_tokens=new_tokens, **GREEDY, **options)


def finish(batch: RunningBatch) -> None:
    while len(batch):
        batch.step()


def generated(model, prompt: torch.Tensor, new_tokens: int = 9, **options) -> list[list[int]]:
    """The ids of a call of its own."""
    return model.generate(prompt, max_new_tokens=new_tokens, **GREEDY, **options).tolist()
