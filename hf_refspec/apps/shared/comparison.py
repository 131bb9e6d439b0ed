"""Plain decoding against other methods: the same prompts in turn, equal ids, the speed-up."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import BatchEncoding, PreTrainedModel

from ...messages import counted
from ...text_config import context_length, text_config
from ...warm_up import warmup

# The arguments of `generate` that are a method's own, by the method's name.
Methods: TypeAlias = Mapping[str, Mapping[str, Any]]
UNDRAFTED = "plain"
FEWEST_PROMPTS = 5  # with fewer their spread is unknown
LEAST_GAIN = 1.02
_LEAST_MAT = 1.005  # less is shown as 1.00
_WARM_UP_LENGTH = 200  # of the prompt, which repeats
_REPEATED = 50  # different tokens
_WARM_UP_TOKENS = 40


@dataclass(frozen=True)
class Decoded:
    """New ids, row after row, of one call or more, their seconds and the model's forward passes."""

    ids: list[int]
    seconds: float
    passes: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return len(self.ids) / self.seconds

    @property
    def mat(self) -> float:
        """Tokens per forward pass."""
        return len(self.ids) / self.passes


def joined(calls: Sequence[Decoded]) -> Decoded:
    """Several calls as one."""
    ids = [token for call in calls for token in call.ids]
    return Decoded(ids, sum(call.seconds for call in calls), sum(call.passes for call in calls))


Show: TypeAlias = Callable[[str, Decoded], None]  # receives each method's call as it ends


def decode(model: PreTrainedModel, inputs: BatchEncoding, **options: Any) -> Decoded:
    """Calls `generate` for prompts, ids and mask `(rows, n)`, and measures the time."""
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    vars(count)["only_reads"] = True  # so that findings about the model stay valid
    drafter = options.get("candidate_generator")
    compiled = "cache_implementation" in options  # a hook would be compiled as well
    hook = None if drafter or compiled else model.register_forward_pre_hook(count)
    try:
        began = perf_counter()
        output = model.generate(**inputs, **options)
        ids = output[:, inputs["input_ids"].shape[1] :].flatten().tolist()  # waits for a GPU
        seconds = perf_counter() - began
    finally:
        if hook is not None:
            hook.remove()
    if drafter:
        passes = drafter.stats.forward_passes
    elif compiled:
        passes = len(ids) // len(output)
    return Decoded(ids, seconds, passes)


def figure_table(names: str, *figures: object) -> Table:
    """A table with a column of names, and columns of figures."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column(names, overflow="fold")
    for column in figures:
        table.add_column(str(column), justify="right")
    return table


def first_difference(plain_ids: Sequence[int], other_ids: Sequence[int]) -> int | None:
    """The first position at which ids differ or one list ends; `None` where they are equal."""
    pairs = enumerate(zip_longest(plain_ids, other_ids))
    return next((i for i, (plain, other) in pairs if plain != other), None)


@dataclass(frozen=True)
class Gain:
    """The speed-up of a method over another, with bounds of 90 % over resampled prompts."""

    prompts: int
    ratio: float
    low: float
    high: float
    drafts_help: bool = True  # False if drafts saved no passes: a higher speed is then chance

    @classmethod
    def of(cls, plain: Sequence[Decoded], other: Sequence[Decoded]) -> Gain:
        """The gain of the `other` calls for the same prompts, in the same order."""
        prompts = len(plain)
        drawn = np.random.default_rng(0).integers(prompts, size=(2000, prompts))

        def rates(calls: Sequence[Decoded]) -> np.ndarray:
            figures = np.array([(len(call.ids), call.seconds) for call in calls])
            tokens, seconds = figures[drawn].sum(axis=1).T
            return tokens / seconds

        low, high = np.percentile(rates(other) / rates(plain), (5, 95))
        return cls(prompts, joined(other).rate / joined(plain).rate, float(low), float(high))

    def __str__(self) -> str:
        """The verdict: it pays, it does not, or why that is undecided."""
        if self.prompts < FEWEST_PROMPTS:
            few = f"{self.ratio:.2f}x over {counted(self.prompts, 'prompt')}"
            return f"is undecided: {few}, and a verdict needs {FEWEST_PROMPTS}"
        if not self.drafts_help:
            return f"does not pay: with a MAT of 1.00 no speed-up comes from drafts ({self.spread})"
        if self.low > 1 and self.ratio >= LEAST_GAIN:
            return f"pays: {self.spread}"
        if self.high < LEAST_GAIN:
            return f"does not pay: {self.spread}"
        spans = f"spans {1 if self.low <= 1 else LEAST_GAIN}"
        return f"is undecided: {self.spread}, an interval that {spans}; more prompts narrow it"

    @property
    def spread(self) -> str:
        return f"{self.ratio:.2f}x ({self.low:.2f}x to {self.high:.2f}x)"


class Comparison:
    """Several methods that answer the same prompts in turn, compared with the first of them.

    `new_methods` returns them with new drafters, `options` are arguments that all of them share."""

    def __init__(
        self, model: PreTrainedModel, new_methods: Callable[[], Methods], **options: Any
    ) -> None:
        self.model = model
        self.options = options
        self._new_methods = new_methods
        self.methods = new_methods()
        self.first = next(iter(self.methods))
        self.calls: dict[str, list[Decoded]] = {name: [] for name in self.methods}
        self.prompts: list[list[int]] = []  # the ids of those that were asked

    def warm_up(self) -> None:
        """Compiles the kernels, and calls each method once with new drafters: first calls probe."""
        warmup()
        vocabulary = text_config(self.model).vocab_size
        longest = (context_length(self.model) or 2 * _WARM_UP_LENGTH) - _WARM_UP_TOKENS
        numbers = torch.arange(max(min(_WARM_UP_LENGTH, longest), 1))
        ids = (1 + numbers % min(_REPEATED, vocabulary - 1))[None].to(self.model.device)
        inputs = BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        for method in self._new_methods().values():
            options = {**self.options, **method, "max_new_tokens": _WARM_UP_TOKENS}
            decode(self.model, inputs, **options)

    def call(self, name: str, inputs: BatchEncoding, **options: Any) -> Decoded:
        """Decodes a prompt by one method; every method has the same random numbers."""
        torch.manual_seed(len(self.calls[self.first]))
        return decode(self.model, inputs, **{**self.options, **options, **self.methods[name]})

    def record(self, calls: Mapping[str, Decoded]) -> None:
        for name, call in calls.items():
            self.calls[name].append(call)

    def ask(self, inputs: BatchEncoding, show: Show | None = None, **options: Any) -> Decoded:
        """Decodes a prompt by all methods, in a random order; returns the first method's call."""
        order = random.Random(len(self.calls[self.first]))
        found: dict[str, Decoded] = {}
        for name in order.sample(list(self.methods), len(self.methods)):
            found[name] = self.call(name, inputs, **options)
            if show is not None:
                show(name, found[name])
        self.record(found)
        self.prompts.append(inputs["input_ids"].flatten().tolist())
        return found[self.first]

    def total(self, name: str) -> Decoded:
        """A method's calls, over all prompts."""
        return joined(self.calls[name])

    def equal(self, name: str) -> int:
        """The number of a method's texts that equal the first method's."""
        pairs = zip(self.calls[self.first], self.calls[name], strict=True)
        return sum(first.ids == other.ids for first, other in pairs)

    def gain(self, name: str, over: str | None = None) -> Gain:
        """The speed-up of a method over another one, by default the first."""
        gain = Gain.of(self.calls[over or self.first], self.calls[name])
        drafts = "candidate_generator" in self.methods[name]
        return replace(gain, drafts_help=not drafts or self.total(name).mat >= _LEAST_MAT)

    def table(self) -> Table:
        table = figure_table("method", "seconds", "tokens/s", "speed-up", "MAT", "equal texts")
        for name, calls in self.calls.items():
            total = self.total(name)
            table.add_row(
                name,
                f"{total.seconds:.1f}",
                f"{total.rate:.1f}",
                f"{total.rate / self.total(self.first).rate:.2f}x",
                f"{total.mat:.2f}",
                f"{self.equal(name)} of {len(calls)}",
            )
        return table

    def report(self, console: Console, over: Mapping[str, str] | None = None) -> int:
        """Prints the table and each method's verdict, against the first or the one in `over`.

        Returns 1 if texts differ in float32."""
        console.print(self.table())
        plain = self.total(self.first)
        for name in list(self.calls)[1:]:
            other = (over or {}).get(name, self.first)
            total = self.total(name)
            cost = total.seconds / total.passes * plain.passes / plain.seconds
            about = f"{total.mat:.2f} tokens a pass, which takes {cost:.2f} times as long"
            gain = self.gain(name, other)
            console.print(f"{name} against {other} {gain}; {about}", soft_wrap=True)
        differing = [name for name, calls in self.calls.items() if self.equal(name) < len(calls)]
        if differing and self.model.dtype == torch.float32:
            console.print(f"IDS DIFFER: {', '.join(differing)}", soft_wrap=True)
            return 1
        if differing:
            console.print(
                "in 16 bits near-ties between tokens flip; in float32 all texts are equal"
            )
        return 0
