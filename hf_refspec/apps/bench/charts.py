"""The charts that a run has: which methods are drawn together, and in which file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .methods import PLAIN
from .plots import plot_settings, plot_speed_ups
from .summary import Entry, by_setting, suites_by_dtype, summaries

WAITING = "the model that waits for every search"
NAMED = 2  # suites in the title of a panel


@dataclass(frozen=True)
class Chart:
    """A chart of a report.

    Attributes:
        file (`str`): The name of its file.
        title (`str`): What it shows.
        draw (callable): Draws it to a path.
    """

    file: str
    title: str
    draw: Callable[[Path], None]


def charts(results: dict[str, Any]) -> list[Chart]:
    """The headline, for the suites without retrieval together; each of them, if there are several;
    each suite with retrieval. With `--ablate` the settings of token recycling are the headline."""
    of_dtypes = suites_by_dtype(results["suites"])
    together: dict[str, list[Entry]] = {}
    apart: dict[str, list[Entry]] = {}
    for dtype, suites in of_dtypes.items():
        names = ", ".join(suites) if len(suites) <= NAMED else f"{len(suites)} suites"
        together[f"{names}, {dtype}"] = [each for entries in suites.values() for each in entries]
        apart |= {f"{suite}, {dtype}": entries for suite, entries in suites.items()}
    drawn = []
    if together and results["settings"].get("ablate"):
        summarized = {name: summaries(entries) for name, entries in together.items()}
        title = "MAT with each setting of token recycling"
        drawn.append(Chart("settings.png", title, partial(plot_settings, summarized)))
    elif together:
        drawn.append(_speed_ups("speed_ups.png", together, PLAIN))
        if len(apart) > len(together):
            drawn.append(_speed_ups("speed_ups_by_suite.png", apart, PLAIN))
    for name, panels in _retrieving(results["suites"]).items():
        drawn.append(_speed_ups(f"speed_ups_{name}.png", panels, WAITING))
    return drawn


def _retrieving(suites: dict[str, Any]) -> dict[str, dict[str, list[Entry]]]:
    """The suites with retrieval: the entries of each retriever and type of numbers.

    What is measured beside them without retrieval writes another text, and is left out.
    """
    found: dict[str, dict[str, list[Entry]]] = {}
    for suite in suites.values():
        for setting, entries in by_setting(suite["entries"]).items():
            if setting:
                panels = found.setdefault(suite["suite"], {})
                panels[f"{setting}, {suite['dtype']}"] = [
                    {**each, "samples": [of for of in each["samples"] if of["retrieval"]]}
                    for each in entries
                ]
    return found


def _speed_ups(file: str, panels: dict[str, list[Entry]], baseline: str) -> Chart:
    titled = {
        f"{name}, {len(entries)} prompt{'s' * (len(entries) > 1)}": summaries(entries)
        for name, entries in panels.items()
    }
    title = f"Speed-up in decoding over {baseline}"
    return Chart(file, title, partial(plot_speed_ups, titled, title))
