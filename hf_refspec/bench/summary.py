"""The samples of each method summarized; speed-ups are of pairs, prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np

Entry: TypeAlias = dict[str, Any]  # a prompt, see `Bench.measure`
Sample: TypeAlias = dict[str, Any]  # a call of `generate`, see `Bench.measure`
Key: TypeAlias = tuple[str, "int | str"]  # a method's name and its number of draft nodes


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of some numbers."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """All three are NaN if there are no values."""
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
    """All samples of one method.

    Attributes:
        samples, tokens (`int`): How many calls, and how many new tokens in all of them.
        mat (`float`): New tokens per forward pass.
        prefill_seconds (`Spread`): Up to the end of the first forward pass.
        tokens_per_second (`Spread`): In decoding, that is after the first forward pass.
        decoding_speed_up (`Spread`): Of decoding, over the first method.
        speed_up (`Spread`): Of the whole call, over the first method.
        drafting_microseconds (`float`): Per forward pass; 0 where transformers drafts.
        different, other_tokens (`int`): How many samples have ids other than the first method's,
            and how many ids these are.
        retrieval (`dict[str, float]`, *optional*): Where it retrieved: `gamma` (the fraction of
            verified speculation steps that were right), `stride` (mean steps per verification, 0
            without speculation), `searches` (per prompt), and `waiting` (the fraction of the time
            that was spent waiting for searches).
    """

    samples: int
    tokens: int
    mat: float
    prefill_seconds: Spread
    tokens_per_second: Spread
    decoding_speed_up: Spread
    speed_up: Spread
    drafting_microseconds: float
    different: int
    other_tokens: int
    retrieval: dict[str, float] | None


def summaries(entries: list[Entry]) -> dict[Key, Summary]:
    """Summarizes each method, in the order in which they are listed in the entries."""
    pairs: dict[Key, list[tuple[Sample, Sample]]] = {}
    for entry in entries:
        first = entry["samples"][0]
        for sample in entry["samples"]:
            pairs.setdefault((sample["method"], sample["nodes"]), []).append((first, sample))
    return {key: _summary(of_method) for key, of_method in pairs.items()}


def _summary(pairs: list[tuple[Sample, Sample]]) -> Summary:
    """Of a method's samples, each paired with the first method's sample of the same prompt."""
    samples = [sample for _, sample in pairs]
    # An answer of one token has no decoding: the first forward pass yields it.
    longer = [pair for pair in pairs if min(sample["tokens"] for sample in pair) > 1]
    passes = _total(samples, "forward_passes")
    return Summary(
        samples=len(samples),
        tokens=_total(samples, "tokens"),
        mat=_total(samples, "tokens") / passes,
        prefill_seconds=Spread.of([sample["prefill_seconds"] for sample in samples]),
        tokens_per_second=Spread.of([_decoding_speed(sample) for _, sample in longer]),
        decoding_speed_up=_ratios(_decoding_speed, longer),
        speed_up=_ratios(_speed, pairs),
        drafting_microseconds=1e6 * _total(samples, "drafting_seconds") / passes,
        different=sum(sample["other_tokens"] > 0 for sample in samples),
        other_tokens=_total(samples, "other_tokens"),
        retrieval=_retrieval(samples) if all(sample["retrieval"] for sample in samples) else None,
    )


def _retrieval(samples: list[Sample]) -> dict[str, float]:
    stats = [sample["retrieval"] for sample in samples]
    strides = [stride for each in stats for stride in each["strides"]]
    verified, mismatched = _total(stats, "verified"), _total(stats, "mismatched")
    return {
        "gamma": verified / max(verified + mismatched, 1),
        "stride": fmean(strides) if strides else 0.0,
        "searches": _total(stats, "searches") / len(stats),
        "waiting": _total(stats, "waiting_seconds") / sum(map(_seconds, samples)),
    }


def _total(samples: list[dict[str, Any]], name: str) -> Any:
    return sum(sample[name] for sample in samples)


def _ratios(speed: Callable[[Sample], float], pairs: list[tuple[Sample, Sample]]) -> Spread:
    return Spread.of([speed(sample) / speed(first) for first, sample in pairs])


def _decoding_speed(sample: Sample) -> float:
    return (sample["tokens"] - 1) / sample["decoding_seconds"]


def _seconds(sample: Sample) -> float:
    return sample["prefill_seconds"] + sample["decoding_seconds"]


def _speed(sample: Sample) -> float:
    return sample["tokens"] / _seconds(sample)
