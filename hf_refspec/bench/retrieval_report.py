"""Tables of retrieval that was speculated, and of what it was held against."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from .report import table
from .retrieval_ways import (
    BASELINE,
    OURS,
    PUBLISHED,
    STRIDES,
    WITHOUT_SKETCH,
    ablations,
    main_ways,
    scheduled_name,
    stride_name,
    with_drafts,
    without_retrieval,
)
from .summary import Entry, Spread, described_differences

COLUMNS = (
    "way",
    "seconds a run",
    "tokens/s",
    "speed-up",
    "gamma",
    "mean stride",
    "searches",
    "waiting",
    "other ids",
)


@dataclass(frozen=True)
class WaySummary:
    """All samples of a way.

    Attributes:
        seconds (`list[float]`): Of all questions together, for each run.
        speed_ups (`list[float]`): The same of the baseline against that.
        tokens (`int`): New ones of a run.
        gamma (`float`): The share of right steps, of those that a verification got to.
        mean_stride (`float`): Steps of a verification; 0 where there was none.
        searches (`float`): Of a run.
        waiting (`float`): The share of the time that was spent waiting for searches.
        queries, model (`float`): The shares that were spent making queries, and generating.
        different, samples, other_tokens (`int`): How many samples had other ids than the baseline,
            of how many, and in how many tokens.
    """

    seconds: list[float]
    speed_ups: list[float]
    tokens: int
    gamma: float
    mean_stride: float
    searches: float
    waiting: float
    queries: float
    model: float
    different: int
    samples: int
    other_tokens: int

    @property
    def speed_up(self) -> float:
        return fmean(self.speed_ups)


def retrieval_tables(entries: list[Entry]) -> str:
    """The tables of each retriever.

    Args:
        entries (`list[dict]`): What `measure` of the suite has yielded.
    """
    names = dict.fromkeys(entry["retriever"] for entry in entries)
    parts = [
        "Seconds and speed-ups are of all questions together: means over the runs, with standard "
        "deviations. Gamma is the share of speculated steps that were right. The last two rows of "
        "the first table retrieve nothing: what the text would have been without it, and its "
        "speed.\n"
    ]
    for name in names:
        parts += _retriever([entry for entry in entries if entry["retriever"] == name])
    return "\n".join(parts)


def _retriever(entries: list[Entry]) -> list[str]:
    name, passages = entries[0]["retriever"], entries[0]["passages"]
    ablated = [entry for entry in entries if entry["ablated"]]
    parts = [f"### {name}, {passages:,} to search\n", _baseline_ratio(entries)]
    searches = [entry["search_seconds"] for entry in entries if "search_seconds" in entry]
    if searches:
        parts.append(_search_table(searches))
    names = [way.name for way in [*main_ways(), *with_drafts()]]
    names += [WITHOUT_SKETCH, *(way.name for way in without_retrieval())]
    parts.append(_ways_table(entries, names))
    if ablated:
        names = [BASELINE, *(way.name for way in ablations()), PUBLISHED, OURS]
        parts += [f"Of {len(ablated)} questions:\n", _ways_table(ablated, names)]
        parts += [_stride_table(ablated)]
    return parts


def _baseline_ratio(entries: list[Entry]) -> str:
    baseline = summarised(entries, BASELINE)
    ratio = baseline.waiting / (baseline.queries + baseline.model)
    sides = f"{ratio:.1f} : 1" if ratio >= 1 else f"1 : {1 / ratio:.1f}"
    return (
        f"Of {len(entries)} questions; retrieval to generation time of the baseline (searches : "
        f"model and queries) {sides}; {baseline.queries:.0%} of its time went into making queries."
        "\n"
    )


def _search_table(searches: list[dict[str, list[float]]]) -> str:
    batches = list(searches[0])
    spreads = [
        Spread.of([1e3 * each for search in searches for each in search[batch]])
        for batch in batches
    ]
    row = ["ms a search", *(f"{spread:.2f}" for spread in spreads)]
    return table(["queries of a search", *batches], [row])


def _ways_table(entries: list[Entry], names: Iterable[str]) -> str:
    measured = {sample["way"] for entry in entries for sample in entry["runs"]}
    return table(COLUMNS, (_row(entries, name) for name in names if name in measured))


def _row(entries: list[Entry], name: str) -> list[str]:
    way = summarised(entries, name)
    speculated, searches = way.mean_stride > 0, way.searches > 0
    return [
        name,
        mean(way.seconds),
        f"{way.tokens / fmean(way.seconds):.1f}",
        mean(way.speed_ups),
        f"{way.gamma:.3f}" if speculated else "",
        f"{way.mean_stride:.2f}" if speculated else "",
        f"{way.searches:.0f}" if searches else "",
        f"{way.waiting:.0%}" if searches else "",
        described_differences(way.different, way.samples, way.other_tokens) if searches else "",
    ]


def _stride_table(entries: list[Entry]) -> str:
    """The speed-up with each fixed stride, and with the one that OS3 chooses."""
    rows = []
    for asynchronous, label in ((True, "asynchronous"), (False, "synchronous")):
        fixed = [summarised(entries, stride_name(each, asynchronous)).speed_up for each in STRIDES]
        chosen = summarised(entries, scheduled_name(asynchronous)).speed_up
        against = f"{chosen / max(fixed) - 1:+.1%}"
        rows.append([label, *(f"{each:.2f}" for each in [*fixed, chosen]), against])
    return table(["stride", *STRIDES, "OS3", "OS3 against the best"], rows)


def mean(values: list[float]) -> str:
    """With the standard deviation, if there are several."""
    text = f"{fmean(values):.2f}"
    return f"{text} ± {stdev(values):.2f}" if len(values) > 1 else text


def summarised(entries: list[Entry], name: str) -> WaySummary:
    """Sums up a way and the baseline on the same questions."""
    samples = [sample for entry in entries for sample in entry["runs"] if sample["way"] == name]
    baseline = [s for entry in entries for s in entry["runs"] if s["way"] == BASELINE]
    seconds, of_baseline = _seconds_by_run(samples), _seconds_by_run(baseline)

    def total(key: str) -> Any:
        return sum(sample["stats"][key] for sample in samples)

    verified = total("verified")
    strides = [stride for sample in samples for stride in sample["stats"]["strides"]]
    runs = len(seconds)
    return WaySummary(
        seconds=seconds,
        speed_ups=[other / own for other, own in zip(of_baseline, seconds, strict=True)],
        tokens=sum(sample["tokens"] for sample in samples) // runs,
        gamma=verified / max(verified + total("mismatched"), 1),
        mean_stride=fmean(strides) if strides else 0.0,
        searches=total("searches") / runs,
        waiting=total("waiting_seconds") / sum(seconds),
        queries=total("query_seconds") / sum(seconds),
        model=total("model_seconds") / sum(seconds),
        different=sum(sample["other_tokens"] > 0 for sample in samples),
        other_tokens=sum(sample["other_tokens"] for sample in samples),
        samples=len(samples),
    )


def _seconds_by_run(samples: list[dict[str, Any]]) -> list[float]:
    seconds: dict[int, float] = {}
    for sample in samples:
        seconds[sample["run"]] = seconds.get(sample["run"], 0.0) + sample["seconds"]
    return list(seconds.values())
