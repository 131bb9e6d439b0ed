"""The verification and the cost of drafts for a model: [`check`]."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from .drafting.contract import Call, Observation
from .drafting.tree import DraftTree
from .kernels.compilation import drafting_kernels
from .kernels.pass_kernels import narrow_dtype
from .text_config import context_length, text_config
from .verification.caches import new_cache
from .warm_up import AllWidths

TIMED_TOKENS = (1, 2, 4, 8, 16, 32, 64)
_ROUNDS = 5  # of plain steps and passes of each size; their medians count


@dataclass(frozen=True)
class ModelCheck:
    """The findings of [`check`]; its `str` is a table.

    Attributes:
        model (`str`): The name of the model's class.
        dtype, device (`str`): The dtype and device of its weights.
        cache (`str`): The cache that `generate` creates, with the kinds of its layers.
        verification (`str`): `"tree"`, `"chain"`, or `"none"` where calls decode plainly.
        rows (`str`): The verification of a batch of two.
        reason (`str`, *optional*): Why calls decode plainly.
        narrow_kernel (`str`): `"active"` if passes over up to 32 tokens run by the package's own
            kernel, otherwise `"inactive"` and the reason.
        context (`int`): Tokens of the text that was timed.
        plain_seconds (`float`): The time of a plain step.
        relative_costs (`dict[int, float]`): By the number of tokens of a pass, its time in plain
            steps.
    """

    model: str
    dtype: str
    device: str
    cache: str
    verification: str
    rows: str
    reason: str | None
    narrow_kernel: str
    context: int
    plain_seconds: float
    relative_costs: dict[int, float]

    @property
    def advice(self) -> str:
        """Which passes `"auto"` will run to verify drafts."""
        if self.reason is not None:
            return f"Calls decode plainly: {self.reason}."
        pays = []
        for mat in (2, 3):
            sizes = [n for n, cost in self.relative_costs.items() if n > 1 and cost < mat]
            if sizes:
                pays.append(f"up to {max(sizes)} tokens a pass where it expects a MAT of {mat}")
        verified = ", ".join(pays) or "almost nothing: passes over several tokens are too expensive"
        return f'"auto" verifies {verified}.'

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        exact = {"tree": "exact", "chain": "not exact, chains are"}.get(self.verification, "-")
        lines = [
            f"{self.model}, {self.dtype}, {self.device}",
            f"cache          {self.cache}",
            f"verification   {self.verification} (trees: {exact}); two rows: {self.rows}",
            f"narrow kernel  {self.narrow_kernel}",
            f"plain step     {1000 * self.plain_seconds:.1f} ms at {self.context} tokens",
        ]
        if self.relative_costs:
            lines += ["", "tokens of a pass   plain steps = least MAT that pays"]
            lines += [f"{n:16d}   {cost:.2f}" for n, cost in self.relative_costs.items()]
        return "\n".join([*lines, "", self.advice])


def check(model: PreTrainedModel, context: int = 256) -> ModelCheck:
    """Finds out how drafts are verified with a model and what they cost, in about a minute.

    Args:
        model (`PreTrainedModel`): A decoder-only model.
        context (`int`, *optional*, defaults to 256): The length of the text that is timed.

    Returns:
        [`ModelCheck`]: Print it.

    Raises:
        ValueError: If `context` is less than 8 or longer than the model can read, or the model has
            no single decoder.
    """
    longest = (context_length(model) or 2**31) - 2 * (len(TIMED_TOKENS) + TIMED_TOKENS[-1])
    if not 8 <= context <= longest:
        raise ValueError(
            f"context={context} cannot be timed: for this model it must be from 8 to {longest}"
        )
    drafting_kernels.compile()
    generator = torch.Generator().manual_seed(0)
    size = (2, context)
    ids = torch.randint(text_config(model).vocab_size, size, generator=generator, device="cpu")
    ids = ids.to(model.device)
    two_rows = _drafted(model, ids)
    one_row = _drafted(model, ids[:1])
    times: list[float] = []  # of each token of a plain call
    steps: list[float] = []

    def note_time(input_ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        times.append(perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    seconds: dict[int, list[float]] = {n: [] for n in TIMED_TOKENS}
    for _ in range(_ROUNDS):
        times.clear()
        _generate(model, ids[:1], 4, stopping_criteria=[note_time])
        steps += [later - earlier for earlier, later in pairwise(times)]
        if one_row.stats.verification != "none":
            for n, taken in _drafted(model, ids[:1]).seconds.items():
                seconds.get(n, []).append(taken)
    plain = median(steps)
    costs = {n: median(taken) / plain for n, taken in seconds.items() if taken}
    cache = new_cache(model)
    layers = Counter(type(layer).__name__ for layer in cache.layers)
    counts = ", ".join(f"{count} {kind}" for kind, count in layers.items())
    parameter = next(model.parameters())
    narrow = narrow_dtype(model)
    return ModelCheck(
        model=type(model).__name__,
        dtype=str(parameter.dtype).removeprefix("torch."),
        device=str(parameter.device),
        cache=f"{type(cache).__name__} ({counts})",
        verification=one_row.stats.verification,
        rows=two_rows.stats.verification,
        reason=one_row.stats.reason,
        narrow_kernel=f"inactive: {narrow}" if isinstance(narrow, str) else "active",
        context=context,
        plain_seconds=plain,
        relative_costs=costs,
    )


def _generate(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, **options: Any) -> Any:
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )


def _drafted(model: PreTrainedModel, ids: torch.Tensor) -> _EverySize:
    drafter = _EverySize(TIMED_TOKENS)
    max_nodes = TIMED_TOKENS[-1] - 1
    _generate(
        model,
        ids,
        2 * (len(TIMED_TOKENS) + max_nodes),  # a draft ends where the text does
        stopping_criteria=[drafter.all_have_run],
        candidate_generator=drafter,
        max_draft_tokens=max_nodes,
    )
    return drafter


class _EverySize(AllWidths):
    """Drafts a path that fills each pass, and measures the time until the next observation."""

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        super().begin(prompt_ids, vocab_size)
        self.seconds: dict[int, float] = {}
        self._token = int(prompt_ids[0])  # hardly ever the next one

    def draft(self, budget: int, call: Call) -> DraftTree:
        nodes = len(super().draft(budget, call))
        self._began = perf_counter()
        return DraftTree.chain(np.full(nodes, self._token))

    def observe(self, observation: Observation) -> None:
        if self.drafted:
            self.seconds[1 + len(observation.verified)] = perf_counter() - self._began
