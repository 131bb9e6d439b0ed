"""The Markdown report of a run, and the comparison of two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from .results import read_results
from .summary import Entry, Key, Summary, summaries

EXPLAINED = (
    "Each prompt was decoded by all methods, in mixed order. Seconds are of all calls together; a "
    "speed-up is the ratio of their tokens per second to the first method's; of decoding, the "
    "median over the prompts with the quartiles in brackets. MAT is new tokens per forward pass, "
    "over all prompts. Texts equal are those with the ids of the first method; where a text was "
    "forced, those that the model would have chosen by itself. Regret is how much longer a "
    "token took with the automatic draft budget than with the best fixed one."
)
MARGINS_EXPLAINED = (
    "Where a text first differs, its margin is the distance of two logits of plain decoding, those "
    "of its own token and of the other one, in steps of {dtype} at that size; 0 is an exact tie."
)
RETRIEVAL_EXPLAINED = (
    "Gamma is the fraction of speculated steps that were right, the stride the number of steps per "
    "verification, waiting the fraction of the time that was spent waiting for searches. Methods "
    "without searches retrieve nothing, so that their text is another one."
)


def _of_retrieval(name: str, spec: str) -> Callable[[Summary], str]:
    def text(summary: Summary) -> str:
        retrieval = summary.retrieval
        if retrieval is None or (name in ("gamma", "stride") and not retrieval["stride"]):
            return ""  # no retrieval, or no speculation
        return format(retrieval[name], spec)

    return text


def _equal(summary: Summary) -> str:
    return "" if summary.equal is None else f"{summary.equal} of {summary.samples}"


def _positive(number: float) -> str:
    return f"{number:.0f}" if number else ""


def _widest(summary: Summary) -> str:
    return f"{max(summary.margins):g}" if summary.margins else ""


# A column that is empty for all methods is left out.
COLUMNS: dict[str, Callable[[Summary], str]] = {
    "MAT": lambda summary: f"{summary.mat:.2f}",
    "seconds": lambda summary: f"{summary.seconds:.1f}",
    "speed-up": lambda summary: f"{summary.speed_up:.2f}",
    "of decoding": lambda summary: f"{summary.decoding_speed_up:.2f}",
    "drafting, µs a pass": lambda summary: _positive(summary.drafting_microseconds),
    "learning": lambda summary: _positive(summary.learning_microseconds),
    "gamma": _of_retrieval("gamma", ".3f"),
    "mean stride": _of_retrieval("stride", ".2f"),
    "searches": _of_retrieval("searches", ".0f"),
    "waiting": _of_retrieval("waiting", ".0%"),
    "texts equal": _equal,
    "widest margin": _widest,
}


def report(results: dict[str, Any]) -> str:
    """A run as Markdown: the machine, versions and settings, then the tables of each suite."""
    about = (results["machine"], results["versions"], results["settings"])
    lines = [
        "- " + ", ".join(f"{name} {_listed(value)}" for name, value in part.items())
        for part in about
    ]
    suites = results["suites"]
    parts = [*_all_together(suites), *(_suite(name, suite) for name, suite in suites.items())]
    return "\n".join(["# hf-refspec bench\n", *lines, "", EXPLAINED, "", *parts])


def _all_together(suites: dict[str, Any]) -> Iterator[str]:
    """What the suites without retrieval come to, if there are several; for each type of numbers."""
    by_dtype: dict[str, dict[str, list[Entry]]] = {}
    for suite in suites.values():
        if suite["entries"] and "setting" not in suite["entries"][0]:
            by_dtype.setdefault(suite["dtype"], {})[suite["suite"]] = suite["entries"]
    for dtype, of_suite in by_dtype.items():
        if len(of_suite) > 1:
            all_entries = [entry for entries in of_suite.values() for entry in entries]
            tables = methods_table(summaries(all_entries)), _parts_table(of_suite)
            yield "\n".join([f"## All suites, {dtype}\n", *tables])


def _suite(name: str, suite: dict[str, Any]) -> str:
    parts = [f"## {name}", _counted(suite)]
    by_setting = _by_setting(suite["entries"])
    if any(by_setting):
        parts.append(RETRIEVAL_EXPLAINED)
    for setting, entries in by_setting.items():
        if setting:
            parts.append(f"### {setting}, {entries[0]['size']:,} to search")
        parts.append(methods_table(summaries(entries)))
    if categories := _by_category(suite["entries"]):
        parts.append(_parts_table(categories))
    if margins := _margins_table(suite["entries"]):
        parts += [MARGINS_EXPLAINED.format(dtype=suite["dtype"]), margins]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _counted(suite: dict[str, Any]) -> str:
    skipped = suite["skipped"]
    text = f"{suite['done']} of {suite['questions']} questions"
    if skipped:
        text += f", {len(skipped)} of them skipped, at least in part (the first: {skipped[0]})"
    return text + "."


def _by_setting(entries: list[Entry]) -> dict[str, list[Entry]]:
    """The entries of each retriever; of a suite without retrieval all of them under `""`."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.get("setting", ""), []).append(entry)
    return groups


def methods_table(methods: dict[Key, Summary]) -> str:
    """A row for each method."""
    rows = [
        [*_named(*key), *(text(summary) for text in COLUMNS.values()), _regret(methods, *key)]
        for key, summary in methods.items()
    ]
    columns = ["method", "nodes", *COLUMNS, "regret"]
    used = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    return table([columns[i] for i in used], ([row[i] for i in used] for row in rows))


def _listed(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list) else value


def _named(name: str, nodes: int | str) -> list[str]:
    return [name.replace("|", "\\|"), str(nodes or "")]


def _regret(methods: dict[Key, Summary], name: str, nodes: int | str) -> str:
    """How much longer a token took with the automatic budget than with the best of the others."""
    fixed = [of.speed_up for key, of in methods.items() if key[0] == name and key[1] != "auto"]
    if nodes != "auto" or not fixed:
        return ""
    return f"{max(fixed) / methods[name, nodes].speed_up - 1:+.1%}"


def _by_category(entries: list[Entry]) -> dict[str, list[Entry]]:
    """The entries of each category of questions, if there are any."""
    categories: dict[str, list[Entry]] = {}
    for entry in entries:
        category, slash, _ = entry["name"].partition("/")
        if slash and "setting" not in entry:
            categories.setdefault(category, []).append(entry)
    return categories


def _parts_table(parts: dict[str, list[Entry]]) -> str:
    """MAT and speed-up of each method in each suite or category."""
    summed = [summaries(entries) for entries in parts.values()]
    rows = (
        [*_named(*key), *(f"{of[key].mat:.2f}, {of[key].speed_up:.2f}x" for of in summed)]
        for key in summed[0]
    )
    return table(["method", "nodes", *parts], rows)


def _margins_table(entries: list[Entry]) -> str:
    """Each place where texts first differ, with its margin and how many methods differ there."""
    rows = []
    for entry in entries:
        different = (sample["first_difference"] for sample in entry["samples"])
        places = Counter((each["place"], each["steps"]) for each in different if each)
        for (place, steps), methods in sorted(places.items()):
            rows.append([entry["name"], place, f"{steps:g}", methods])
    return table(["text", "new token", "margin, steps", "methods"], rows) if rows else ""


def table(columns: list[Any], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def compare(paths: list[str]) -> str:
    """Compares two runs, as Markdown, on the prompts that both have measured.

    Args:
        paths (`list[str]`): Two results.json, or the folders that they are in.

    Raises:
        FileNotFoundError, ValueError: If they are not two results with a prompt in common.
    """
    if len(paths) != 2:
        raise ValueError(
            f"compare takes two results, but got {len(paths)}: hf-refspec bench compare A B"
        )
    one, other = (read_results(Path(path)) for path in paths)
    suites = [
        part
        for name in one["suites"]
        if name in other["suites"]
        for part in _compare_suite(
            name, one["suites"][name]["entries"], other["suites"][name]["entries"]
        )
    ]
    if not suites:
        raise ValueError("the two results have no prompt in common; measure the same suite twice")
    rows = [
        [name, one[kind].get(name), other[kind].get(name)]
        for kind in ("machine", "versions", "settings")
        for name in {**one[kind], **other[kind]}
        if one[kind].get(name) != other[kind].get(name)
    ]
    return "\n".join([table(["", "A", "B"], rows), *suites] if rows else suites)


def _compare_suite(name: str, one: list[Entry], other: list[Entry]) -> Iterator[str]:
    """A table for each retriever, or one for a suite without retrieval."""
    columns = ["method", "nodes", "MAT", "seconds", "speed-up", "of decoding"]
    others = _by_setting(other)
    for setting, entries in _by_setting(one).items():
        # The same name with another text does not count: the data file may be another one.
        before, after = (
            {(entry["name"], entry["text"]): entry for entry in some}
            for some in (entries, others.get(setting, []))
        )
        both = [key for key in before if key in after]
        if both:
            old, new = (summaries([some[key] for key in both]) for some in (before, after))
            rows = [[*_named(*key), *_changes(old[key], new[key])] for key in old if key in new]
            about = f", {setting}" if setting else ""
            yield f"## {name}{about}, {len(both)} prompts\n\n{table(columns, rows)}"


def _changes(old: Summary, new: Summary) -> list[str]:
    """With the quartiles of decoding: a change that lies within them may be chance."""

    def change(one: float, other: float, digits: int) -> str:
        return f"{one:.{digits}f} → {other:.{digits}f}, {other / one - 1:+.1%}"

    before, after = old.decoding_speed_up, new.decoding_speed_up
    return [
        change(old.mat, new.mat, 2),
        change(old.seconds, new.seconds, 1),
        change(old.speed_up, new.speed_up, 2),
        f"{before:.2f} → {after:.2f}, {after.median / before.median - 1:+.1%}",
    ]
