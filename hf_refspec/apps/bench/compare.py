"""The comparison of two runs, as Markdown."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from pathlib import Path

from .report import FEW, FIGURES, listed, names, table
from .results import read_results
from .summary import Entry, Spread, Summary, summaries

EXPLAINED = (
    "Figures cover the prompts that both runs measured. In brackets are the quartiles of the "
    "changes prompt by prompt. A change is bold where both of its quartiles are gains or both are "
    f"losses, over at least {FEW} prompts; any other may be chance."
)
COMPARED: dict[str, Callable[[Summary], float]] = {**FIGURES, "seconds": lambda s: s.seconds}


def compare(paths: list[str]) -> str:
    """Compares two runs, two results.json or their folders, on the prompts that both measured."""
    if len(paths) != 2:
        raise ValueError(
            f"compare takes two results, but got {len(paths)}: hf-refspec bench compare A B"
        )
    one, other = (read_results(Path(path)) for path in paths)
    suites = [
        _compare_suite(name, suite["entries"], other["suites"][name]["entries"])
        for name, suite in one["suites"].items()
        if name in other["suites"]
    ]
    suites = [suite for suite in suites if suite]
    if not suites:
        raise ValueError("the two results have no prompt in common; measure the same suite twice")
    rows = [
        [name, *(listed(run[kind].get(name, "")) for run in (one, other))]
        for kind in ("machine", "versions", "settings")
        for name in {**one[kind], **other[kind]}
        if one[kind].get(name) != other[kind].get(name)
    ]
    differing = [table(["", "A", "B"], rows)] if rows else []
    return "\n".join([*differing, f"{EXPLAINED}\n", *suites])


def _compare_suite(name: str, one: list[Entry], other: list[Entry]) -> str:
    """The table of a suite; "" if the runs have no prompt in common."""
    # The same name with another text does not count: the data file may differ.
    before, after = (
        {(entry["name"], entry["text"]): entry for entry in each} for each in (one, other)
    )
    common = [key for key in before if key in after]
    if not common:
        return ""
    changes = _changes([before[key] for key in common], [after[key] for key in common])
    return f"## {name}, {len(common)} prompts\n\n{changes}"


def _changes(before: list[Entry], after: list[Entry]) -> str:
    """The table of each method's changes on the same prompts."""
    old, new = summaries(before), summaries(after)
    methods = [key for key in old if key in new]
    by_prompt = [
        (summaries([one]), summaries([other])) for one, other in zip(before, after, strict=True)
    ]
    columns = names(methods)
    for name, figure in COMPARED.items():
        columns[name] = []
        for key in methods:
            changes = [
                figure(other[key]) / figure(one[key]) - 1
                for one, other in by_prompt
                if key in one and key in other
            ]
            changes = [change for change in changes if not isnan(change)]
            columns[name].append(_change(name, figure(old[key]), figure(new[key]), changes))
    return table(list(columns), zip(*columns.values(), strict=True))


def _change(name: str, one: float, other: float, by_prompt: list[float]) -> str:
    """A cell: two figures of a method, and the change of the one to the other."""
    if not by_prompt:
        return "-"  # answers of one token have no decoding
    spread = Spread.of(by_prompt)
    digits = 1 if name == "seconds" else 2
    text = f"{one:.{digits}f} → {other:.{digits}f}, {other / one - 1:+.1%}"
    if name == "of decoding":
        text += f" [{spread.low:+.1%}, {spread.high:+.1%}]"
    clear = len(by_prompt) >= FEW and (spread.low > 0 or spread.high < 0)
    return f"**{text}**" if clear else text
