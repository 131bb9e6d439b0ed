"""The Markdown report of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .methods import (
    BASELINE,
    OURS,
    PUBLISHED,
    STRIDES,
    ablations,
    scheduled_name,
    stride_name,
    strides,
)
from .results import Results
from .summary import Entry, Key, RetrievalSummary, Spread, Summary, summaries

EXPLAINED = (
    "Medians, with the quartiles in brackets, over the prompts; each prompt was decoded by all "
    "methods in turn, and its speed-ups are against the first of them on that prompt. MAT is new "
    "tokens per forward pass, over all prompts. Other ids are those that the model chose otherwise "
    "than with the first method; where a text was forced, those that it would have chosen after it."
)
RETRIEVAL_EXPLAINED = (
    "Gamma is the fraction of speculated steps that were right, the stride how many steps a "
    "verification was of, waiting that for searches. Methods without a number of searches retrieve "
    "nothing: what the text would have been without it, and its speed."
)


def _of_retrieval(
    text: Callable[[RetrievalSummary], str], speculated: bool = False
) -> Callable[[Summary], str]:
    def column(summary: Summary) -> str:
        retrieval = summary.retrieval
        known = retrieval is not None and (retrieval.mean_stride > 0 or not speculated)
        return text(retrieval) if retrieval is not None and known else ""

    return column


# A column that is empty for all methods is left out.
COLUMNS: dict[str, Callable[[Summary], str]] = {
    "MAT": lambda summary: f"{summary.mat:.2f}",
    "prefill, s": lambda summary: f"{summary.prefill_seconds:.3f}",
    "decoding, tokens/s": lambda summary: f"{summary.tokens_per_second:.1f}",
    "speed-up in decoding": lambda summary: f"{summary.decoding_speed_up:.2f}",
    "speed-up in all": lambda summary: f"{summary.speed_up:.2f}",
    "drafting, µs a pass": lambda summary: (
        f"{summary.drafting_microseconds:.0f}" if summary.drafting_microseconds else ""
    ),
    "gamma": _of_retrieval(lambda retrieval: f"{retrieval.gamma:.3f}", speculated=True),
    "mean stride": _of_retrieval(lambda retrieval: f"{retrieval.mean_stride:.2f}", speculated=True),
    "searches": _of_retrieval(lambda retrieval: f"{retrieval.searches:.0f}"),
    "waiting": _of_retrieval(lambda retrieval: f"{retrieval.waiting:.0%}"),
    "other ids": lambda summary: summary.other_ids,
}


def table(columns: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table."""
    lines = [list(columns), ["---"] * len(list(columns)), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def suite_tables(entries: list[Entry]) -> str:
    """The tables of a suite: one for all its prompts, or for each retriever."""
    retrievers = dict.fromkeys(entry["retriever"] for entry in entries if "retriever" in entry)
    if not retrievers:
        return f"{EXPLAINED}\n\n{methods_table(summaries(entries))}{_category_table(entries)}"
    parts = [EXPLAINED, RETRIEVAL_EXPLAINED]
    for name in retrievers:
        parts += _retriever_tables(name, [each for each in entries if each["retriever"] == name])
    return "\n\n".join(parts)


def methods_table(methods: dict[Key, Summary]) -> str:
    """A row for each method."""
    rows = [
        [name, nodes or "", *(column(summary) for column in COLUMNS.values())]
        for (name, nodes), summary in methods.items()
    ]
    columns = ["method", "nodes", *COLUMNS]
    used = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    return table([columns[i] for i in used], ([row[i] for i in used] for row in rows))


def _category_table(entries: list[Entry]) -> str:
    """Where questions have categories, MAT and the median speed-up in decoding of each."""

    def category(entry: Entry) -> str:
        return entry["name"].partition("/")[0] if "/" in entry["name"] else ""

    names = [name for name in dict.fromkeys(map(category, entries)) if name]
    if not names:
        return ""
    by_category = [
        summaries([each for each in entries if category(each) == name]) for name in names
    ]
    rows = [
        [
            *key,
            *(f"{of[key].mat:.2f}, {of[key].decoding_speed_up.median:.2f}x" for of in by_category),
        ]
        for key in by_category[0]
    ]
    return "\n" + table(["method", "nodes", *names], rows)


def _retriever_tables(name: str, entries: list[Entry]) -> list[str]:
    """The main methods, and of the questions that have them all the ablations and strides."""
    extra = {*ablations(), *strides()}
    main = {key: each for key, each in summaries(entries).items() if key[0] not in extra}
    parts = [
        f"### {name}, {entries[0]['passages']:,} to search",
        _searches_to_generation(main[BASELINE, 0]),
        methods_table(main),
    ]
    ablated = summaries([entry for entry in entries if entry["ablated"]])
    if ablated:
        of_boosters = {BASELINE, *ablations(), PUBLISHED, OURS}
        boosters = {key: each for key, each in ablated.items() if key[0] in of_boosters}
        parts += ["Ablations:", methods_table(boosters), _stride_table(ablated)]
    return parts


def _searches_to_generation(baseline: Summary) -> str:
    retrieval = baseline.retrieval
    assert retrieval is not None
    ratio = retrieval.waiting / (retrieval.queries + retrieval.model)
    sides = f"{ratio:.1f} : 1" if ratio >= 1 else f"1 : {1 / ratio:.1f}"
    return (
        f"Of {baseline.samples} samples; retrieval to generation time of the baseline (searches : "
        f"model and queries) {sides}; {retrieval.queries:.0%} of its time went into making queries."
    )


def _stride_table(methods: dict[Key, Summary]) -> str:
    """The median speed-up with each fixed stride, and with the one that OS3 chooses."""
    rows = []
    for asynchronous, label in ((True, "asynchronous"), (False, "synchronous")):
        names = [*(stride_name(each, asynchronous) for each in STRIDES)]
        fixed = [methods[name, 0].speed_up.median for name in names]
        chosen = methods[scheduled_name(asynchronous), 0].speed_up.median
        against = f"{chosen / max(fixed) - 1:+.1%}"
        rows.append([label, *(f"{each:.2f}" for each in [*fixed, chosen]), against])
    return table(["stride", *STRIDES, "OS3", "OS3 against the best"], rows)


def pass_cost_table(pass_costs: dict[str, Any]) -> str:
    """The cost of a forward pass over each number of tokens, and against that of one."""
    spreads = {
        tokens: Spread.of([1e3 * each for each in seconds])
        for tokens, seconds in pass_costs["seconds"].items()
    }
    rows = [
        [tokens, f"{spread:.2f}", f"{spread.median / spreads['1'].median:.2f}"]
        for tokens, spread in spreads.items()
    ]
    return table(["tokens in a pass", "ms", "against one token"], rows)


def suites_report(results: Results) -> str:
    """With what, how much and what was measured."""
    suites = (
        f"## {name}\n\n{_counted(results, name)}\n\n"
        + (suite_tables(entries) if (entries := results.entries(name)) else "")
        for name in results.suites
    )
    return "\n".join([f"# hf-refspec bench\n\n{_about(results)}", *suites])


def details_report(results: Results, plots: Iterable[str]) -> str:
    """What stands behind it: the cost of forward passes, and the files of the plots."""
    parts = []
    if results.pass_costs:
        context = results.pass_costs["context"]
        parts.append(
            f"## Forward passes\n\nOf {results.pass_costs['parameters']:,} parameters, after "
            f"{context} cached tokens.\n\n" + pass_cost_table(results.pass_costs)
        )
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
