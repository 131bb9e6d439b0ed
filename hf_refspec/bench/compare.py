"""`hf-refspec bench compare A B`: two runs side by side, on the prompts that both have measured."""

from __future__ import annotations

from pathlib import Path

from .report import table
from .results import Results
from .summary import Entry, Summary, summaries


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
    shared = [name for name in before if name in now]
    if not shared:
        return []
    old = summaries([before[name] for name in shared])
    new = summaries([now[name] for name in shared])
    rows = [[*key, *_row(old[key], new[key])] for key in old if key in new]
    columns = ["way", "nodes", "MAT", "", "tokens/s", "", "speed-up in decoding", ""]
    return [f"## {suite}, {len(shared)} prompts\n", table(columns, rows)]


def _row(old: Summary, new: Summary) -> list[str]:
    cells = []
    for one, other, digits in (
        (old.mat, new.mat, 2),
        (old.tokens_per_second.median, new.tokens_per_second.median, 1),
        (old.decoding_speed_up.median, new.decoding_speed_up.median, 2),
    ):
        cells += [f"{one:.{digits}f} → {other:.{digits}f}", f"{other / one - 1:+.1%}"]
    return cells
