"""The Markdown report of a run, with its charts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from math import isnan
from pathlib import Path
from typing import Any

from .plots import charts, plot_speed_ups, speed_up_title
from .summary import Entry, Key, Summary, retrieves, suites_by_dtype, summaries

FEW = 10  # prompts
EXPLAINED = (
    "Each prompt was decoded by all methods, in mixed order. Seconds are of all calls together; a "
    "speed-up is the ratio of their tokens per second to the first method's; of decoding, the "
    "median over the prompts with the quartiles in brackets. MAT is new tokens per forward pass, "
    "over all prompts. Texts are equal if they have the ids of the first method; where a text was "
    "forced, the ids that the model would have chosen by itself. Regret is how much longer a token "
    "took with the automatic draft budget than with the best fixed one. The best of a column is "
    "bold."
)
MARGINS_EXPLAINED = (
    "Where a text first differs, its margin is the distance between two logits of plain decoding, "
    "those of its own token and of the other one, in steps of rounding at that size; 0 is a tie."
)


def _positive(number: float, spec: str = ".0f") -> str:
    return format(number, spec) if number else ""


# Larger is better, and the best is bold.
FIGURES: dict[str, Callable[[Summary], float]] = {
    "MAT": lambda summary: summary.mat,
    "speed-up": lambda summary: summary.speed_up,
    "of decoding": lambda summary: summary.decoding_speed_up.median,
}
# A column that is empty for all methods is left out.
COLUMNS: dict[str, Callable[[Summary], str]] = {
    "MAT": lambda summary: f"{summary.mat:.2f}",
    "seconds": lambda summary: f"{summary.seconds:.1f}",
    "tokens/s": lambda summary: f"{summary.tokens / summary.seconds:.1f}",
    "speed-up": lambda summary: f"{summary.speed_up:.2f}",
    "of decoding": lambda summary: f"{summary.decoding_speed_up:.2f}",
    "drafting, µs a pass": lambda summary: _positive(summary.drafting_microseconds),
    "learning": lambda summary: _positive(summary.learning_microseconds),
    "memory, GiB": lambda summary: _positive(summary.peak_bytes / 2**30, ".1f"),
    "texts equal": lambda s: "" if s.equal is None else f"{s.equal} of {s.samples}",
    "widest margin": lambda summary: f"{max(summary.margins):g}" if summary.margins else "",
}


def write_report(results: dict[str, Any], folder: Path) -> str:
    """Writes report.md and its charts; returns its text."""
    text = report(results)
    (folder / "report.md").write_text(text, encoding="utf-8")
    for file, chart in charts(results).items():
        plot_speed_ups(chart, folder / file)
    return text


def report(results: dict[str, Any]) -> str:
    """A run as Markdown: charts, machine, versions and settings, then the tables of each suite."""
    pictures = [f"![{speed_up_title(of)}]({file})\n" for file, of in charts(results).items()]
    about = (results["machine"], results["versions"], results["settings"])
    lines = [
        "- " + ", ".join(f"{name} {listed(value)}" for name, value in part.items())
        for part in about
    ]
    suites = results["suites"]
    parts = [*_all_together(suites), *(_suite(name, suite) for name, suite in suites.items())]
    return "\n".join(["# hf-refspec bench\n", *pictures, *lines, "", EXPLAINED, "", *parts])


def few_prompts(entries: list[Entry]) -> str:
    """A warning if quartiles depend on two or three prompts, else ""."""
    if not entries or len(entries) >= FEW:
        return ""
    reason = f"few prompts ({len(entries)}): medians and quartiles may be chance"
    return f"{reason}; measure more, with a higher --limit or without it"


def _all_together(suites: dict[str, Any]) -> Iterator[str]:
    """The suites without retrieval summed up, if there are several; for each dtype."""
    for dtype, of_suite in suites_by_dtype(suites).items():
        if len(of_suite) > 1:
            all_entries = [entry for entries in of_suite.values() for entry in entries]
            tables = methods_table(summaries(all_entries)), _parts_table(of_suite)
            yield "\n".join([f"## All suites, {dtype}\n", *tables])


def _suite(name: str, suite: dict[str, Any]) -> str:
    counted, skipped = f"{suite['done']} of {suite['questions']} questions", suite["skipped"]
    if skipped:
        counted += f", {len(skipped)} of them skipped, at least in part (the first: {skipped[0]})"
    parts = [f"## {name}", f"{counted}."]
    if warning := few_prompts(suite["entries"]):
        parts.append(f"> [!WARNING]\n> {warning[0].upper()}{warning[1:]}.")
    if suite["entries"]:
        parts.append(methods_table(summaries(suite["entries"])))
    if categories := _by_category(suite["entries"]):
        parts.append(_parts_table(categories))
    if margins := _margins_table(suite["entries"]):
        parts += [MARGINS_EXPLAINED, margins]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def methods_table(methods: dict[Key, Summary]) -> str:
    """A row for each method."""
    columns = {
        **names(methods),
        **{name: [text(each) for each in methods.values()] for name, text in COLUMNS.items()},
        "regret": [_regret(methods, *key) for key in methods],
    }
    for name in dict.fromkeys(name for each in methods.values() for name in each.figures):
        columns[name] = [
            f"{each.figures[name]:.3g}" if name in each.figures else "" for each in methods.values()
        ]
    for name, figure in FIGURES.items():
        columns[name] = best_bold(columns[name], methods, figure)
    columns = {name: texts for name, texts in columns.items() if any(texts)}
    return table(list(columns), zip(*columns.values(), strict=True))


def best_bold(
    texts: list[str], methods: dict[Key, Summary], figure: Callable[[Summary], float]
) -> list[str]:
    """The texts of a column, bold where the figure as printed is the largest. Methods without
    retrieval do not compete with those that retrieve."""
    competing = {
        i: round(figure(method), 2)
        for i, method in enumerate(methods.values())
        if method.equal is not None and not isnan(figure(method))
    }
    best = max(competing.values()) if len(competing) > 1 else None
    return [
        f"**{text}**" if best is not None and competing.get(i) == best else text
        for i, text in enumerate(texts)
    ]


def listed(value: Any) -> Any:
    """A setting as it was given, with the items of a list joined."""
    return " ".join(map(str, value)) if isinstance(value, list) else value


def names(methods: Collection[Key]) -> dict[str, list[str]]:
    """The first two columns."""
    return {
        "method": [name.replace("|", "\\|") for name, _ in methods],
        "nodes": [str(nodes or "") for _, nodes in methods],
    }


def _regret(methods: dict[Key, Summary], name: str, nodes: int | str) -> str:
    """How much longer a token took with the automatic budget than with the best fixed one."""
    fixed = [of.speed_up for key, of in methods.items() if key[0] == name and key[1] != "auto"]
    if nodes != "auto" or not fixed:
        return ""
    return f"{max(fixed) / methods[name, nodes].speed_up - 1:+.1%}"


def _by_category(entries: list[Entry]) -> dict[str, list[Entry]]:
    """The entries of each category of questions; empty without categories."""
    categories: dict[str, list[Entry]] = {}
    for entry in entries:
        category, slash, _ = entry["name"].partition("/")
        if slash and not retrieves(entries):
            categories.setdefault(category, []).append(entry)
    return categories


def _parts_table(parts: dict[str, list[Entry]]) -> str:
    """MAT and speed-up of each method in each suite or category."""
    columns: dict[str, list[str]] = {}
    for part, entries in parts.items():
        methods = summaries(entries)
        columns = columns or names(methods)
        mats = [f"{each.mat:.2f}" for each in methods.values()]
        speed_ups = [f"{each.speed_up:.2f}x" for each in methods.values()]
        mats = best_bold(mats, methods, FIGURES["MAT"])
        speed_ups = best_bold(speed_ups, methods, FIGURES["speed-up"])
        columns[part] = [", ".join(pair) for pair in zip(mats, speed_ups, strict=True)]
    return table(list(columns), zip(*columns.values(), strict=True))


def _margins_table(entries: list[Entry]) -> str:
    """Each place where texts first differ, its margin, and how many methods differ there."""
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
