"""The charts of a run: which methods are drawn together, and in which file."""

from __future__ import annotations

from typing import Any

from .summary import Entry, Sample, by_setting, suites_by_dtype

NAMED = 2  # suites in the title of a panel


def charts(results: dict[str, Any]) -> dict[str, dict[str, list[Entry]]]:
    """The entries of each panel of each chart, by file and title.

    One chart has all suites without retrieval, a panel for each dtype. Each suite with retrieval
    has its own, a panel for each retriever and dtype, without the methods that do not retrieve.
    """
    files: dict[str, dict[str, list[Entry]]] = {}
    for dtype, suites in suites_by_dtype(results["suites"]).items():
        names = ", ".join(suites) if len(suites) <= NAMED else f"{len(suites)} suites"
        entries = [entry for of_suite in suites.values() for entry in of_suite]
        files.setdefault("speed_ups.png", {})[f"{names}, {dtype}"] = entries
    for suite in results["suites"].values():
        for setting, entries in by_setting(suite["entries"]).items():
            if setting:
                panels = files.setdefault(f"speed_ups_{suite['suite']}.png", {})
                panels[f"{setting}, {suite['dtype']}"] = [
                    {**entry, "samples": _that_retrieve(entry)} for entry in entries
                ]
    return files


def _that_retrieve(entry: Entry) -> list[Sample]:
    return [sample for sample in entry["samples"] if sample["other_tokens"] is not None]
