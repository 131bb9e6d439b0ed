"""`hf-refspec bench compare A B`: two runs side by side, on the prompts that both have measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .report import table
from .results import Results
from .summary import Entry, Spread, Summary, summaries

COLUMNS = [
    *("method", "nodes", "MAT", "", "tokens/s", ""),
    *("speed-up in decoding", "", "speed-up in all", ""),
]


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
    suites = [
        part
        for suite in one.suites
        if suite in other.suites
        for part in _suite(suite, one.entries(suite), other.entries(suite))
    ]
    if not suites:
        raise ValueError("the two results have no prompt in common; measure a suite with both")
    return "\n".join(filter(None, [_settings(one, other), *suites]))


def _settings(one: Results, other: Results) -> str:
    rows = [
        [name, before.get(name), now.get(name)]
        for kind in ("machine", "versions", "settings")
        for before, now in [(getattr(one, kind), getattr(other, kind))]
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    return table(["", "A", "B"], rows) if rows else ""


def _suite(suite: str, before: list[Entry], now: list[Entry]) -> Iterator[str]:
    """A table for each retriever, or one where nothing was retrieved."""
    old, new = _by_prompt(before), _by_prompt(now)
    # With the same text; another data file may have another question of that name.
    both = [key for key in old if key in new and old[key]["asked"] == new[key]["asked"]]
    for retriever in dict.fromkeys(retriever for retriever, _ in both):
        keys = [key for key in both if key[0] == retriever]
        one, other = (summaries([entries[key] for key in keys]) for entries in (old, new))
        rows = [[*key, *_row(one[key], other[key])] for key in one if key in other]
        about = f", {retriever}" if retriever else ""
        yield f"## {suite}{about}, {len(keys)} prompts\n\n{table(COLUMNS, rows)}"


def _by_prompt(entries: list[Entry]) -> dict[tuple[str, str], Entry]:
    return {(entry.get("retriever", ""), entry["name"]): entry for entry in entries}


def _row(old: Summary, new: Summary) -> list[str]:
    return [
        f"{old.mat:.2f} → {new.mat:.2f}",
        f"{new.mat / old.mat - 1:+.1%}",
        *_change(old.tokens_per_second, new.tokens_per_second, 1),
        *_change(old.decoding_speed_up, new.decoding_speed_up, 2),
        *_change(old.speed_up, new.speed_up, 2),
    ]


def _change(one: Spread, other: Spread, digits: int) -> list[str]:
    """Of medians, with the quartiles: what lies within these may be chance."""
    change = other.median / one.median - 1
    return [f"{one:.{digits}f} → {other:.{digits}f}", f"{change:+.1%}"]
