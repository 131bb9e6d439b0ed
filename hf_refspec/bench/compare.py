"""`hf-refspec bench compare A B`: two runs side by side, on the prompts that both have measured."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TypeVar

from .report import microseconds, table
from .results import Results
from .retrieval_report import mean, summarised
from .summary import Entry, Spread, Summary, summaries

Key = TypeVar("Key")


def compare(paths: list[str]) -> int:
    """Prints what differs between two runs.

    Args:
        paths (`list[str]`): Two results.json, or the folders that they are in.

    Raises:
        ValueError: If there are not two, or they have no prompt in common.
    """
    if len(paths) != 2:
        raise ValueError(
            f"compare takes two results, but got {len(paths)}: hf-refspec bench compare A.json "
            "B.json"
        )
    print(comparison(*(Results.read(Path(path)) for path in paths)))
    return 0


def comparison(one: Results, other: Results) -> str:
    """The differences as Markdown: settings, then each suite.

    Raises:
        ValueError: If there is no prompt that both have measured.
    """
    parts = [_settings(one, other)]
    for suite in one.suites:
        if suite in other.suites:
            parts += _suite(suite, _decoded(one, suite), _decoded(other, suite))
            parts += _retrieval(suite, _retrieved(one, suite), _retrieved(other, suite))
            parts += _latency(suite, _drafted(one, suite), _drafted(other, suite))
    if len(parts) == 1:
        raise ValueError("the two results have no prompt in common; measure a suite with both")
    return "\n".join(filter(None, parts))


def _settings(one: Results, other: Results) -> str:
    rows = [
        [name, before.get(name), now.get(name)]
        for kind in ("machine", "versions", "settings")
        for before, now in [(getattr(one, kind), getattr(other, kind))]
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    return table(["", "A", "B"], rows) if rows else ""


def _decoded(results: Results, suite: str) -> dict[str, Entry]:
    """What was decoded, by the name of the prompt."""
    return {entry["name"]: entry for entry in results.entries(suite) if "samples" in entry}


def _suite(suite: str, before: dict[str, Entry], now: dict[str, Entry]) -> list[str]:
    shared = _shared(before, now)
    if not shared:
        return []
    old = summaries([before[name] for name in shared])
    new = summaries([now[name] for name in shared])
    rows = [[*key, *_row(old[key], new[key])] for key in old if key in new]
    columns = ["way", "nodes", "MAT", "", "tokens/s", "", "speed-up in decoding", ""]
    return [f"## {suite}, {len(shared)} prompts\n", table(columns, rows)]


def _shared(before: dict[Key, Entry], now: dict[Key, Entry]) -> list[Key]:
    """What both have measured, with the same text."""
    return [key for key in before if key in now and before[key]["asked"] == now[key]["asked"]]


def _retrieved(results: Results, suite: str) -> dict[tuple[str, str], Entry]:
    """What was generated with retrieval, by retriever and prompt."""
    return {
        (entry["retriever"], entry["name"]): entry
        for entry in results.entries(suite)
        if "retriever" in entry
    }


def _retrieval(
    suite: str, before: dict[tuple[str, str], Entry], now: dict[tuple[str, str], Entry]
) -> list[str]:
    shared = _shared(before, now)
    rows = []
    for retriever in dict.fromkeys(retriever for retriever, _ in shared):
        old = [before[key] for key in shared if key[0] == retriever]
        new = [now[key] for key in shared if key[0] == retriever]
        for way in (way for way in _ways(old) if way in _ways(new)):
            one, other = summarised(old, way), summarised(new, way)
            seconds = _change_of_means(one.seconds, other.seconds)
            speed_up = _change_of_means(one.speed_ups, other.speed_ups)
            rows.append([retriever, way, *seconds, *speed_up])
    if not rows:
        return []
    columns = ["retriever", "way", "seconds a run", "", "speed-up", ""]
    prompts = len({name for _, name in shared})
    return [f"## {suite}, {prompts} prompts\n", table(columns, rows)]


def _ways(entries: list[Entry]) -> list[str]:
    """The ways in which all of them were measured."""
    ways = [dict.fromkeys(run["way"] for run in entry["runs"]) for entry in entries]
    return [way for way in ways[0] if all(way in others for others in ways)]


def _drafted(results: Results, suite: str) -> dict[tuple[str, int], list[float]]:
    """How long drafts took alone, by drafter and size."""
    return {
        (entry["drafter"], entry["tokens"]): entry["seconds"]
        for entry in results.entries(suite)
        if "drafter" in entry
    }


def _latency(
    suite: str, before: dict[tuple[str, int], list[float]], now: dict[tuple[str, int], list[float]]
) -> list[str]:
    rows = [
        [drafter, f"{tokens:,}", *_change(microseconds(seconds), microseconds(others), 0)]
        for (drafter, tokens), seconds in before.items()
        if (others := now.get((drafter, tokens)))
    ]
    if not rows:
        return []
    return [f"## {suite}\n", table(["drafts from", "tokens", "µs a draft", ""], rows)]


def _row(old: Summary, new: Summary) -> list[str]:
    return [
        f"{old.mat:.2f} → {new.mat:.2f}",
        f"{new.mat / old.mat - 1:+.1%}",
        *_change(old.tokens_per_second, new.tokens_per_second, 1),
        *_change(old.decoding_speed_up, new.decoding_speed_up, 2),
    ]


def _change(one: Spread, other: Spread, digits: int) -> list[str]:
    """Of medians, with the quartiles: what lies within these may be chance."""
    change = other.median / one.median - 1
    return [f"{one:.{digits}f} → {other:.{digits}f}", f"{change:+.1%}"]


def _change_of_means(one: list[float], other: list[float]) -> list[str]:
    change = fmean(other) / fmean(one) - 1
    return [f"{mean(one)} → {mean(other)}", f"{change:+.1%}"]
