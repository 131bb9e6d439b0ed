"""Samples of one method, summed up; speed-ups are of pairs, prompt by prompt and run by run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np

Entry: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[str, "int | str"]  # a method and its number of nodes


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
class RetrievalSummary:
    """What a method retrieved.

    Attributes:
        gamma (`float`): The fraction of right steps, of those that a verification got to.
        mean_stride (`float`): Steps of a verification; 0 where there was none.
        searches (`float`): Of a prompt.
        waiting, queries, model (`float`): The fractions of the time that were spent waiting for
            searches, making queries, and generating.
    """

    gamma: float
    mean_stride: float
    searches: float
    waiting: float
    queries: float
    model: float


@dataclass(frozen=True)
class Summary:
    """All samples of one method.

    Attributes:
        samples, tokens, forward_passes (`int`): In all.
        mat (`float`): New tokens per forward pass.
        prefill_seconds (`Spread`): Up to the end of the first forward pass.
        tokens_per_second (`Spread`): From there on.
        decoding_speed_up (`Spread`): In decoding, against the first method.
        speed_up (`Spread`): The same with the prefill.
        drafting_microseconds (`float`): Of a forward pass; 0 where others draft.
        accepted_lengths (`list[int]`): How many passes accepted 0, 1, 2, ... draft tokens.
        different, other_tokens (`int`): Samples with other tokens than the first method chooses,
            and how many these are.
        retrieval ([`RetrievalSummary`], *optional*): Where it retrieved.
    """

    samples: int
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
    retrieval: RetrievalSummary | None

    @property
    def other_ids(self) -> str:
        """How many samples differ, and in how many tokens if they do."""
        tokens = f", {self.other_tokens:,} tokens" if self.different else ""
        return f"{self.different} of {self.samples}{tokens}"


def summaries(entries: list[Entry]) -> dict[Key, Summary]:
    """Sums up each method, in the order in which they were measured.

    Args:
        entries (`list[dict]`): Of prompts, as [`Bench.measure`] returns them.
    """
    pairs: dict[Key, list[tuple[dict, dict]]] = {}
    for entry in entries:
        first: dict[int, dict] = {}
        for sample in entry["samples"]:
            plain = first.setdefault(sample["run"], sample)
            pairs.setdefault((sample["method"], sample["nodes"]), []).append((plain, sample))
    return {key: _summary(of_method) for key, of_method in pairs.items()}


def _summary(pairs: list[tuple[dict, dict]]) -> Summary:
    samples = [sample for _, sample in pairs]

    def total(name: str) -> Any:
        return sum(sample[name] for sample in samples)

    # An answer of one token is all prefill.
    longer = [pair for pair in pairs if min(sample["tokens"] for sample in pair) > 1]
    passes = total("forward_passes")
    return Summary(
        samples=len(samples),
        tokens=total("tokens"),
        forward_passes=passes,
        mat=total("tokens") / passes,
        prefill_seconds=Spread.of([sample["prefill_seconds"] for sample in samples]),
        tokens_per_second=Spread.of([_decoding_speed(sample) for _, sample in longer]),
        decoding_speed_up=_ratios(_decoding_speed, longer),
        speed_up=_ratios(_speed, pairs),
        drafting_microseconds=1e6 * total("drafting_seconds") / passes,
        accepted_lengths=[
            sum(each)
            for each in zip_longest(*(s["accepted_lengths"] for s in samples), fillvalue=0)
        ],
        different=sum(sample["other_tokens"] > 0 for sample in samples),
        other_tokens=total("other_tokens"),
        retrieval=_retrieval([sample for sample in samples if sample["retrieval"]]),
    )


def _retrieval(samples: list[dict]) -> RetrievalSummary | None:
    if not samples:
        return None

    def total(name: str) -> Any:
        return sum(sample["retrieval"][name] for sample in samples)

    verified, seconds = total("verified"), sum(map(_seconds, samples))
    strides = [stride for sample in samples for stride in sample["retrieval"]["strides"]]
    return RetrievalSummary(
        gamma=verified / max(verified + total("mismatched"), 1),
        mean_stride=fmean(strides) if strides else 0.0,
        searches=total("searches") / len(samples),
        waiting=total("waiting_seconds") / seconds,
        queries=total("query_seconds") / seconds,
        model=total("model_seconds") / seconds,
    )


def _ratios(speed: Callable[[dict], float], pairs: list[tuple[dict, dict]]) -> Spread:
    return Spread.of([speed(sample) / speed(plain) for plain, sample in pairs])


def _decoding_speed(sample: dict) -> float:
    return (sample["tokens"] - 1) / sample["decoding_seconds"]


def _seconds(sample: dict) -> float:
    return sample["prefill_seconds"] + sample["decoding_seconds"]


def _speed(sample: dict) -> float:
    return sample["tokens"] / _seconds(sample)
