"""The forward passes that models run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from transformers import PreTrainedModel


@contextmanager
def passes_of(*models: PreTrainedModel) -> Iterator[list[int]]:
    """The number of tokens of each pass that these models run until the block is left."""
    tokens: list[int] = []

    def count(model, args, kwargs):
        tokens.append((kwargs["input_ids"] if "input_ids" in kwargs else args[0]).numel())

    count.only_reads = True  # so that the model is not probed anew, and its calls draft
    with ExitStack() as hooks:
        for model in models:
            hooks.callback(model.register_forward_pre_hook(count, with_kwargs=True).remove)
        yield tokens
