"""The samples of each method summarized, and compared with the first method's."""

from __future__ import annotations

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
    """All samples of one method."""

    samples: int
    tokens: int
    seconds: float
    mat: float
    speed_up: float  # the tokens per second of all calls together, over the first method's
    decoding_speed_up: Spread  # over the first method, after the first pass, prompt by prompt
    drafting_microseconds: float  # per forward pass; 0 where transformers drafts
    learning_microseconds: float
    peak_bytes: int  # of GPU memory; 0 on a CPU
    equal: int | None  # texts equal to the first method's; `None` if only one of the two retrieves
    margins: list[float]  # the `steps` of the first difference in each of the other texts
    figures: dict[str, float]  # the means of the samples' further figures


def summaries(entries: list[Entry]) -> dict[Key, Summary]:
    """Summarizes each method, in the order of the entries."""
    pairs: dict[Key, list[tuple[Sample, Sample]]] = {}
    for entry in entries:
        first = entry["samples"][0]
        for sample in entry["samples"]:
            pairs.setdefault((sample["method"], sample["nodes"]), []).append((first, sample))
    return {key: _summary(of_method) for key, of_method in pairs.items()}


def retrieves(entries: list[Entry]) -> bool:
    """Whether the methods retrieve while they generate: then the first one has further figures."""
    return any(entry["samples"][0]["figures"] for entry in entries)


def suites_by_dtype(suites: dict[str, Any]) -> dict[str, dict[str, list[Entry]]]:
    """The entries of each suite without retrieval, by dtype."""
    by_dtype: dict[str, dict[str, list[Entry]]] = {}
    for suite in suites.values():
        if suite["entries"] and not retrieves(suite["entries"]):
            by_dtype.setdefault(suite["dtype"], {})[suite["suite"]] = suite["entries"]
    return by_dtype


def _summary(pairs: list[tuple[Sample, Sample]]) -> Summary:
    """Summarizes a method's samples, each after the first method's sample of the same prompt."""
    samples = [sample for _, sample in pairs]
    # An answer of one token has no decoding: the first forward pass returns it.
    longer = [pair for pair in pairs if min(sample["tokens"] for sample in pair) > 1]
    passes = _total(samples, "forward_passes")
    others = [sample["other_tokens"] for sample in samples]
    different = [each["first_difference"] for each in samples if each["first_difference"]]
    return Summary(
        samples=len(samples),
        tokens=_total(samples, "tokens"),
        seconds=sum(map(_seconds, samples)),
        mat=_total(samples, "tokens") / passes,
        speed_up=_speed(samples) / _speed([first for first, _ in pairs]),
        decoding_speed_up=Spread.of([_decoding_speed(s) / _decoding_speed(f) for f, s in longer]),
        drafting_microseconds=1e6 * _total(samples, "drafting_seconds") / passes,
        learning_microseconds=1e6 * _total(samples, "learning_seconds") / passes,
        peak_bytes=max(sample["peak_bytes"] for sample in samples),
        equal=None if None in others else others.count(0),
        margins=[each["steps"] for each in different],
        figures={
            name: fmean(sample["figures"][name] for sample in samples)
            for name in samples[0]["figures"]
        },
    )


def _total(samples: list[dict[str, Any]], name: str) -> Any:
    return sum(sample[name] for sample in samples)


def _decoding_speed(sample: Sample) -> float:
    """Tokens per second after the first forward pass."""
    return (sample["tokens"] - 1) / sample["decoding_seconds"]


def _seconds(sample: Sample) -> float:
    return sample["prefill_seconds"] + sample["decoding_seconds"]


def _speed(samples: list[Sample]) -> float:
    return _total(samples, "tokens") / sum(map(_seconds, samples))
