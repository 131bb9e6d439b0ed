"""How drafts of a model will be verified, and what they cost: [`check`]."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, StoppingCriteria

from ..drafting.compilation import drafting_kernels
from ..drafting.observation import Observation
from ..drafting.tree import DraftTree
from ..text_config import context_length, text_config
from ..verification.caches import new_cache
from .warmup import AllWidths, WhenAllHaveRun

PASS_TOKENS = (1, 2, 4, 8, 16, 32, 64)
_ROUNDS = 5  # of plain steps and passes of each size; their medians count


@dataclass(frozen=True)
class ModelCheck:
    """The findings of [`check`]; its `str` is a table.

    Attributes:
        model (`str`): The name of the model's class.
        dtype, device (`str`): Of its weights.
        cache (`str`): The cache that `generate` makes, with the kinds of its layers.
        verification (`str`): `"tree"`, `"chain"`, or `"none"` where calls decode plainly.
        rows (`str`): The same for a batch of two.
        reason (`str`, *optional*): Why calls decode plainly.
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
    context: int
    plain_seconds: float
    relative_costs: dict[int, float]

    @property
    def advice(self) -> str:
        """The passes that `"auto"` will verify drafts by."""
        if self.reason is not None:
            return f"Calls decode plainly: {self.reason}."
        pays = []
        for mat in (2, 3):
            sizes = [n for n, cost in self.relative_costs.items() if n > 1 and cost < mat]
            if sizes:
                pays.append(f"up to {max(sizes)} tokens a pass where it expects a MAT of {mat}")
        most = ", ".join(pays) or "hardly anything, for passes over several tokens cost too much"
        return f'"auto" verifies {most}.'

    def __str__(self) -> str:
        exact = {"tree": "exact", "chain": "not exact, chains are"}.get(self.verification, "-")
        lines = [
            f"{self.model}, {self.dtype}, {self.device}",
            f"cache          {self.cache}",
            f"verification   {self.verification} (trees: {exact}); two rows: {self.rows}",
            f"plain step     {1000 * self.plain_seconds:.1f} ms at {self.context} tokens",
        ]
        if self.relative_costs:
            lines += ["", "tokens of a pass   plain steps = least MAT that pays"]
            lines += [f"{n:16d}   {cost:.2f}" for n, cost in self.relative_costs.items()]
        return "\n".join([*lines, "", self.advice])


def check(model: PreTrainedModel, context: int = 256) -> ModelCheck:
    """Finds out what drafts of a model are verified by and what they cost, in about a minute.

    Args:
        model (`PreTrainedModel`): A decoder-only model.
        context (`int`, *optional*, defaults to 256): The length of the text that is timed.

    Returns:
        [`ModelCheck`]: Print it.

    Raises:
        ValueError: If `context` is less than 8 or longer than the model can read, or the model has
            no single decoder.
    """
    most = (context_length(model) or 2**31) - 2 * (len(PASS_TOKENS) + PASS_TOKENS[-1])
    if not 8 <= context <= most:
        raise ValueError(f"`context` must be 8 to {most} for this model, but is {context}.")
    drafting_kernels.compile()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(text_config(model).vocab_size, (2, context), generator=generator)
    ids = ids.to(model.device)
    two = _drafted(model, ids)
    one, clock = _drafted(model, ids[:1]), _Clock()
    seconds: dict[int, list[float]] = {n: [] for n in PASS_TOKENS}
    for _ in range(_ROUNDS):
        _generate(model, ids[:1], 4, stopping_criteria=[clock])
        clock.times.append(math.nan)  # between two calls
        if one.stats.verification != "none":
            for n, taken in _drafted(model, ids[:1]).seconds.items():
                seconds.get(n, []).append(taken)
    steps = [later - earlier for earlier, later in pairwise(clock.times)]
    plain = median(step for step in steps if not math.isnan(step))
    costs = {n: median(taken) / plain for n, taken in seconds.items() if taken}
    cache, parameter = new_cache(model), next(model.parameters())
    kinds = Counter(type(layer).__name__ for layer in cache.layers)
    return ModelCheck(
        type(model).__name__,
        str(parameter.dtype).removeprefix("torch."),
        str(parameter.device),
        f"{type(cache).__name__} ({', '.join(f'{n} {kind}' for kind, n in kinds.items())})",
        one.stats.verification,
        two.stats.verification,
        one.stats.reason,
        context,
        plain,
        costs,
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
    drafter, most = _EverySize(PASS_TOKENS), PASS_TOKENS[-1] - 1
    _generate(
        model,
        ids,
        2 * (len(PASS_TOKENS) + most),  # a draft ends where the text does
        stopping_criteria=[WhenAllHaveRun(drafter)],
        candidate_generator=drafter,
        max_draft_tokens=most,
    )
    return drafter


class _EverySize(AllWidths):
    """Drafts a path of as many tokens as each pass takes, and takes the time until it observes the
    next token."""

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        super().begin(prompt_ids, vocab_size)
        self.seconds: dict[int, float] = {}
        self._token = int(prompt_ids[0])  # hardly ever the next one

    def draft(self, budget: int) -> DraftTree:
        nodes = len(super().draft(budget))
        self._began = perf_counter()
        return DraftTree.chain(np.full(nodes, self._token))

    def observe(self, observation: Observation) -> None:
        if self.drafted:
            self.seconds[1 + len(observation.verified)] = perf_counter() - self._began


class _Clock(StoppingCriteria):
    """Notes when each token came, and ends nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
