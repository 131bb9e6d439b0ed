"""Samples of one way to decode, summed up; speed-ups are of pairs, prompt by prompt."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np

Entry: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[str, "int | str"]  # a way and its number of nodes


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of some numbers."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Of at least one number; of none it is not a number."""
        if not values:
            return cls(np.nan, np.nan, np.nan)
        low, median, high = np.percentile(values, (25, 50, 75))
        return cls(float(median), float(low), float(high))

    def __format__(self, spec: str) -> str:
        if np.isnan(self.median):
            return "-"
        return f"{self.median:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


@dataclass(frozen=True)
class Summary:
    """All samples of one way.

    Attributes:
        prompts, tokens, forward_passes (`int`): In all.
        mat (`float`): New tokens per forward pass.
        prefill_seconds (`Spread`): Up to the end of the first forward pass.
        tokens_per_second (`Spread`): From there on.
        decoding_speed_up (`Spread`): In decoding, against the first way.
        speed_up (`Spread`): The same with the prefill.
        drafting_microseconds (`float`): Of a forward pass; 0 where others draft.
        accepted_lengths (`list[int]`): How many passes accepted 0, 1, 2, ... draft tokens.
        different, other_tokens (`int`): Prompts with other tokens than plain decoding chooses, and
            how many these are.
    """

    prompts: int
    tokens: int
    forward_passes: int
    mat: float
    prefill_seconds: Spread
    tokens_per_second: Spread
    decoding_speed_up: Spread
    speed_up: Spread
    drafting_microseconds: float
    accepted_lengths: list[int]
    different: int
    other_tokens: int

    @property
    def other_ids(self) -> str:
        """Whether ids were those of plain decoding, for people."""
        return described_differences(self.different, self.prompts, self.other_tokens)


def described_differences(different: int, of: int, other_tokens: int) -> str:
    """How many of some texts differ, and in how many tokens if they do."""
    return f"{different} of {of}" + (f", {other_tokens:,} tokens" if different else "")


def summaries(entries: list[Entry]) -> dict[Key, Summary]:
    """Sums up each way, in the order in which they were measured.

    Args:
        entries (`list[dict]`): Of prompts, as [`Bench.ask`] returns them.
    """
    pairs: dict[Key, list[tuple[dict, dict]]] = {}
    for entry in entries:
        plain = entry["samples"][0]
        for sample in entry["samples"]:
            pairs.setdefault((sample["way"], sample["nodes"]), []).append((plain, sample))
    return {key: _summary(of_way) for key, of_way in pairs.items()}


def _summary(pairs: list[tuple[dict, dict]]) -> Summary:
    samples = [sample for _, sample in pairs]
    tokens = sum(sample["tokens"] for sample in samples)
    passes = sum(sample["forward_passes"] for sample in samples)
    drafting = sum(sample["drafting_seconds"] for sample in samples)
    # An answer of one token is all prefill.
    longer = [(plain, sample) for plain, sample in pairs if min(map(_decoded, (plain, sample))) > 0]
    return Summary(
        prompts=len(samples),
        tokens=tokens,
        forward_passes=passes,
        mat=tokens / passes,
        prefill_seconds=Spread.of([sample["prefill_seconds"] for sample in samples]),
        tokens_per_second=Spread.of([_decoding_speed(sample) for _, sample in longer]),
        decoding_speed_up=Spread.of(
            [_decoding_speed(sample) / _decoding_speed(plain) for plain, sample in longer]
        ),
        speed_up=Spread.of([_speed(sample) / _speed(plain) for plain, sample in pairs]),
        drafting_microseconds=1e6 * drafting / passes,
        accepted_lengths=_added([sample["accepted_lengths"] for sample in samples]),
        different=sum(sample["other_tokens"] > 0 for sample in samples),
        other_tokens=sum(sample["other_tokens"] for sample in samples),
    )


def _decoded(sample: dict) -> int:
    return sample["tokens"] - 1


def _decoding_speed(sample: dict) -> float:
    return _decoded(sample) / sample["decoding_seconds"]


def _speed(sample: dict) -> float:
    return sample["tokens"] / (sample["prefill_seconds"] + sample["decoding_seconds"])


def _added(counts: list[list[int]]) -> list[int]:
    return [sum(each) for each in zip_longest(*counts, fillvalue=0)]
