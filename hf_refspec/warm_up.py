"""Compiling ahead of time, so that no call waits: [`warmup`]."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from .drafting.contract import Call, Drafter
from .drafting.tree import ROOT, DraftTree
from .kernels.compilation import drafting_kernels
from .messages import check_count
from .verification.slots import WIDTHS

# All widths fit into a text of this length, whose cache is as long as that of a shorter one.
_SHORTEST_TEXT = 63


def warmup(
    model: PreTrainedModel | None = None,
    max_length: int = 2048,
    rows: int = 1,
    **options: Any,
) -> None:
    """Compiles the kernels that draft, and the passes of a model over a static cache.

    The kernels take half a minute, once: they are kept on disk. Without it, calls decode plainly
    while another process compiles them.

    torch compiles each width of a pass by itself, which takes half a minute or more where its own
    cache on disk does not have it yet. A call whose texts are no longer than `max_length` then
    compiles nothing.

    Args:
        model (`PreTrainedModel`, *optional*): The model whose passes are compiled, as `generate`
            would with `cache_implementation="static"`. By default none.
        max_length (`int`, *optional*, defaults to 2048): The longest text of later calls, prompt
            and new tokens together. A call with the same `max_length`, or with `max_cache_len` set
            to it, has a cache of the same length.
        rows (`int`, *optional*, defaults to 1): How many texts later calls have.
        options: Other arguments of these calls, such as `compile_config` and
            `verification="reproducible"`.

    Raises:
        ValueError: As `generate` does, and for a `max_length` or `rows` below 1.
    """
    check_count("max_length", max_length)
    check_count("rows", rows)
    drafting_kernels.compile()
    if model is None:
        return
    # With CUDA graphs the third pass of each width is the first to run at full speed.
    drafter = AllWidths(WIDTHS if model.device.type != "cuda" else 3 * WIDTHS)
    others = {name: value for name, value in options.items() if name != "max_new_tokens"}
    model.generate(
        **{"cache_implementation": "static", "do_sample": False, **others},
        input_ids=torch.ones((rows, 1), dtype=torch.int64, device=model.device),
        attention_mask=torch.ones((rows, 1), dtype=torch.int64, device=model.device),
        max_length=max(max_length, _SHORTEST_TEXT),
        max_new_tokens=None,
        eos_token_id=None,
        stopping_criteria=[drafter.all_have_run],
        candidate_generator=drafter,
        max_draft_tokens=WIDTHS[-1] - 1,
    )


class AllWidths(Drafter):
    """Drafts siblings at the root that fill a pass of each width, one width after another."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        self.widths = widths
        self.drafted: list[int] = []  # numbers of nodes

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._left = iter(self.widths)

    def draft(self, budget: int, call: Call) -> DraftTree:
        nodes = min(next(self._left, 1) - 1, budget)
        self.drafted.append(nodes)
        return DraftTree(np.arange(nodes), np.full(nodes, ROOT), np.ones(nodes))

    def all_have_run(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """A stopping criterion that ends the call once each width has been drafted."""
        done = len(self.drafted) >= len(self.widths)
        return torch.full((len(input_ids),), done, device=input_ids.device)
