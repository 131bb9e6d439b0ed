"""The Markdown report of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .results import Results
from .summary import Entry, Key, Spread, Summary, summaries

DECODING_COLUMNS = (
    "way",
    "nodes",
    "MAT",
    "prefill, s",
    "decoding, tokens/s",
    "speed-up in decoding",
    "speed-up in all",
    "drafting, µs a pass",
    "other ids",
)

DECODING_EXPLAINED = (
    "Medians, with the quartiles in brackets, of the prompts; each prompt was decoded in all ways "
    "in turn, and its speed-ups are against plain generate on that prompt. MAT is new tokens per "
    "forward pass, over all prompts. Other ids are those that the model chose otherwise than in "
    "plain generate; where a text was forced, those that it would have chosen after it."
)


def table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table."""
    lines = [list(columns), ["---"] * len(list(columns)), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def decoding_table(entries: list[Entry]) -> str:
    """A row for each way to decode, and where questions have categories a table of these."""
    rows = (_decoding_row(key, summary) for key, summary in summaries(entries).items())
    text = f"{DECODING_EXPLAINED}\n\n{table(DECODING_COLUMNS, rows)}"
    categories = dict.fromkeys(name.split("/")[0] for name in map(_name, entries) if "/" in name)
    if not categories:
        return text
    return text + "\n" + _category_table(entries, list(categories))


def _decoding_row(key: Key, summary: Summary) -> list[str]:
    drafting = summary.drafting_microseconds
    return [
        key[0],
        str(key[1]),
        f"{summary.mat:.2f}",
        f"{summary.prefill_seconds:.3f}",
        f"{summary.tokens_per_second:.1f}",
        f"{summary.decoding_speed_up:.2f}",
        f"{summary.speed_up:.2f}",
        f"{drafting:.0f}" if drafting else "",
        summary.other_ids,
    ]


def _category_table(entries: list[Entry], categories: list[str]) -> str:
    """MAT and the median speed-up in decoding of each way, category by category."""
    by_category = [
        summaries([entry for entry in entries if _name(entry).split("/")[0] == category])
        for category in categories
    ]
    rows = [
        [
            *key,
            *(f"{of[key].mat:.2f}, {of[key].decoding_speed_up.median:.2f}x" for of in by_category),
        ]
        for key in by_category[0]
    ]
    return table(["way", "nodes", *categories], rows)


def _name(entry: Entry) -> str:
    return entry["name"]


def latency_table(entries: list[Entry]) -> str:
    """A row for each drafter and size."""
    rows = [
        [entry["drafter"], f"{entry['tokens']:,}", f"{microseconds(entry['seconds']):.0f}"]
        for entry in entries
    ]
    return "Medians, with the quartiles in brackets, of drafts along one text.\n\n" + table(
        ["drafts from", "tokens", "µs a draft"], rows
    )


def pass_cost_table(pass_costs: dict[str, Any]) -> str:
    """The cost of a forward pass over each number of tokens, and against that of one."""
    spreads = {tokens: Spread.of(each) for tokens, each in pass_costs["seconds"].items()}
    rows = [
        [tokens, f"{_milliseconds(spread):.2f}", f"{spread.median / spreads['1'].median:.2f}"]
        for tokens, spread in spreads.items()
    ]
    return table(["tokens in a pass", "ms", "against one token"], rows)


def microseconds(seconds: list[float]) -> Spread:
    """The spread of times, in microseconds."""
    return Spread.of([1e6 * each for each in seconds])


def _milliseconds(spread: Spread) -> Spread:
    return Spread(*(1e3 * each for each in (spread.median, spread.low, spread.high)))


def suites_report(results: Results, tables: dict[str, str]) -> str:
    """With what, how much and what was measured.

    Args:
        results ([`Results`]): With what, and how much of it.
        tables (`dict[str, str]`): The Markdown of each suite of which something was measured.
    """
    suites = (
        f"## {name}\n\n{_counted(results, name)}\n\n{tables.get(name, '')}"
        for name in results.suites
    )
    return "\n".join([f"# hf-refspec bench\n\n{_about(results)}", *suites])


def details_report(results: Results, plots: Iterable[str], ablation: str | None = None) -> str:
    """What stands behind it.

    Args:
        results ([`Results`]): With the cost of forward passes.
        plots (iterable of `str`): The files of the plots.
        ablation (`str`, *optional*): The table of MAT against the size of a datastore.
    """
    parts = []
    if results.pass_costs:
        context = results.pass_costs["context"]
        parts.append(
            f"## Forward passes\n\nOf {results.pass_costs['parameters']:,} parameters, after "
            f"{context} cached tokens.\n\n" + pass_cost_table(results.pass_costs)
        )
    if ablation is not None:
        parts.append(f"## Size of the datastore\n\n{ablation}")
    parts += [f"![{plot.removesuffix('.png')}]({plot})\n" for plot in plots]
    return "\n".join(parts)


def _about(results: Results) -> str:
    lines = [
        ", ".join(f"{name} {value}" for name, value in about.items() if value is not None)
        for about in (results.machine, results.versions, results.settings)
    ]
    return "".join(f"- {line}\n" for line in lines)


def _counted(results: Results, suite: str) -> str:
    done, skipped = results.suites[suite]["done"], results.skipped(suite)
    text = f"{len(done)} of {results.suites[suite]['questions']} questions"
    if skipped:
        text += f", {len(skipped)} of them skipped, at least in part (the first: {skipped[0]})"
    return text + "."


def ablation_table(points: list[Any]) -> str:
    """MAT of each form and size of a datastore."""
    rows = [[point.form, f"{point.size / 1e6:.2f}", f"{point.mat:.3f}"] for point in points]
    return table(["form", "MB", "MAT"], rows)
