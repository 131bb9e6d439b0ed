"""The charts of a run: which methods are drawn together, and in which file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .plots import plot_speed_ups
from .summary import Entry, Sample, by_setting, suites_by_dtype, summaries

NAMED = 2  # suites in the title of a panel


@dataclass(frozen=True)
class Chart:
    """A chart of a report: its file name, its title, and a function that draws it to a path."""

    file: str
    title: str
    draw: Callable[[Path], None]


def charts(results: dict[str, Any]) -> list[Chart]:
    """One chart of all suites without retrieval together, one of each if there are several, and one
    for each suite with retrieval."""
    together: dict[str, list[Entry]] = {}
    apart: dict[str, list[Entry]] = {}
    for dtype, suites in suites_by_dtype(results["suites"]).items():
        names = ", ".join(suites) if len(suites) <= NAMED else f"{len(suites)} suites"
        together[f"{names}, {dtype}"] = [each for entries in suites.values() for each in entries]
        apart |= {f"{suite}, {dtype}": entries for suite, entries in suites.items()}
    drawn = []
    if together:
        drawn.append(_chart("speed_ups.png", together))
    if len(apart) > len(together):
        drawn.append(_chart("speed_ups_by_suite.png", apart))
    for name, panels in _retrieving(results["suites"]).items():
        drawn.append(_chart(f"speed_ups_{name}.png", panels))
    return drawn


def _retrieving(suites: dict[str, Any]) -> dict[str, dict[str, list[Entry]]]:
    """The entries of each suite with retrieval, by retriever and dtype, without the methods that do
    not retrieve: these write another text."""
    found: dict[str, dict[str, list[Entry]]] = {}
    for suite in suites.values():
        for setting, entries in by_setting(suite["entries"]).items():
            if setting:
                panels = found.setdefault(suite["suite"], {})
                panels[f"{setting}, {suite['dtype']}"] = [
                    {**each, "samples": [of for of in each["samples"] if _is_alike(of)]}
                    for each in entries
                ]
    return found


def _is_alike(sample: Sample) -> bool:
    return sample["other_tokens"] is not None


def _chart(file: str, panels: dict[str, list[Entry]]) -> Chart:
    titled = {
        f"{name}, {len(entries)} prompt{'s' * (len(entries) > 1)}": summaries(entries)
        for name, entries in panels.items()
    }
    baseline = next(iter(panels.values()))[0]["samples"][0]["method"]
    title = f"Speed-up in decoding over {baseline}"
    return Chart(file, title, partial(plot_speed_ups, titled, title))
