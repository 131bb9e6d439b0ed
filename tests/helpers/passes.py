"""The forward passes that models run, and a verifier that has run one."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_refspec.drafting.tree import DraftTree
from hf_refspec.verification.passes import FixedTokens
from hf_refspec.verification.verifier import Kind, Verifier
from tests.helpers.calls import prepared

NO_DRAFT = DraftTree.empty()


@contextmanager
def passes_of(
    *models: PreTrainedModel, seen: Callable[[torch.Tensor], Any] = torch.numel
) -> Iterator[list[Any]]:
    """Of each pass that these models run until the block is left the number of its tokens, or what
    `seen` returns for its ids `(rows, n)`."""
    passes: list[Any] = []

    def count(model, args, kwargs):
        passes.append(seen(kwargs["input_ids"] if "input_ids" in kwargs else args[0]))

    count.only_reads = True  # so that the model is not probed anew, and its calls draft
    with ExitStack() as hooks:
        for model in models:
            hooks.callback(model.register_forward_pre_hook(count, with_kwargs=True).remove)
        yield passes


@torch.no_grad()
def prefilled(model: PreTrainedModel, kind: Kind, prompts: torch.Tensor, **options) -> Verifier:
    """A verifier that has read prompts `(rows, length)`."""
    config, kwargs = prepared(model, prompts, max_new_tokens=40, **options)
    verifier = Verifier(kind, model, config, kwargs)
    verifier.forward([FixedTokens(row[None]) for row in prompts], [NO_DRAFT] * len(prompts))
    verifier.keep([[]] * len(prompts))
    return verifier
