"""The Markdown report of `scripts/gpu_bench`: how fast it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import isnan, nan
from statistics import median
from typing import Any

from .methods import COMPILED, PLAIN
from .report import listed, table
from .summary import Entry, Key, Summary, decoding_speed, summaries

NODES: tuple[int | str, ...] = ("auto", 64)
PLAIN_COMPILED = f"{PLAIN}, {COMPILED}"
EXPLAINED = (
    "Each prompt was decoded by all methods, in mixed order. Tokens per second and ratios are of "
    "decoding, after the prompt, and medians over the prompts; MAT is new tokens per forward pass "
    "and row. Compiled methods have a static cache and CUDA graphs as `generate` makes them, all "
    "others a dynamic cache; transformers refuses its prompt look-up with a static one. "
    "Reproducible ones return the same bits with drafts and without. Warm-up is the time of the "
    "first calls, compiling among them, and memory the most that a call has allocated. The random "
    "model is forced to write recorded answers, with the next token's probability about that of a "
    "trained model."
)


@dataclass
class Stage:
    """What was measured of one model with so many texts at a time.

    Attributes:
        title (`str`): The model and the number of rows.
        entries (`dict[str, list]`): Of each suite, see [`~bench.measure.Bench.measure`].
        first_seconds (`dict[str, float]`): How long warming up took, by method.
        peak_bytes (`dict[str, int]`): The most memory of a call, by method; none on a CPU.
        reserved_bytes (`int`): The most memory that was taken from the device at all.
        left_out (`list[str]`): What was not measured, and why.
    """

    title: str
    entries: dict[str, list[Entry]] = field(default_factory=dict)
    first_seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    reserved_bytes: int = 0
    left_out: list[str] = field(default_factory=list)


@dataclass
class Run:
    """All that is reported.

    Attributes:
        about (`dict`): The machine, the versions and the options.
        stages (`list[Stage]`): What was measured.
        notes (`list[str]`): What could not be, and why.
    """

    about: dict[str, Any]
    stages: list[Stage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def label(method: str, nodes: int | str) -> str:
    """The name of a method with its draft budget."""
    return f"{method}, {nodes}" if nodes else method


def gpu_report(run: Run) -> str:
    """A run as Markdown."""
    parts = [
        f"# {run.about['machine'].get('gpu', 'Without a GPU')}",
        "\n".join(
            "- " + ", ".join(f"{name} {listed(value)}" for name, value in part.items())
            for part in run.about.values()
        ),
        *_notes("Not measured:", run.notes),
        EXPLAINED,
        *(part for stage in run.stages for part in _stage(stage)),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _notes(title: str, notes: Iterable[str]) -> list[str]:
    lines = "\n".join(f"- {note}" for note in notes)
    return [f"{title}\n\n{lines}" if title else lines] if lines else []


def ratios(entries: list[Entry], first: str) -> dict[Key, float]:
    """How fast each method decodes against the one that is named: medians over the prompts."""
    found: dict[Key, float] = {}
    if not entries or all(sample["method"] != first for sample in entries[0]["samples"]):
        return found
    turned = [
        entry | {"samples": sorted(entry["samples"], key=lambda each: each["method"] != first)}
        for entry in entries
    ]
    for key, summary in summaries(turned).items():
        found[key] = summary.decoding_speed_up.median
    return found


def speeds(entries: list[Entry]) -> dict[Key, float]:
    """The tokens per second of each method, a median over the prompts."""
    by_method: dict[Key, list[float]] = {}
    for entry in entries:
        for sample in entry["samples"]:
            key = sample["method"], sample["nodes"]
            by_method.setdefault(key, []).append(decoding_speed(sample))
    return {key: median(values) for key, values in by_method.items()}


def _stage(stage: Stage) -> Iterator[str]:
    yield f"## {stage.title}"
    if stage.reserved_bytes:
        yield f"{stage.reserved_bytes / 2**30:.1f} GiB were taken from the device in all."
    yield from _notes("Left out:", stage.left_out)
    for suite, entries in stage.entries.items():
        yield f"### {suite}, {len(entries)} prompt{'s' if len(entries) > 1 else ''}"
        yield _table(stage, entries)


def _table(stage: Stage, entries: list[Entry]) -> str:
    methods, speed = summaries(entries), speeds(entries)
    against = [ratios(entries, PLAIN), ratios(entries, PLAIN_COMPILED)]

    def row(key: Key, summary: Summary) -> list[str]:
        name = label(*key)
        seconds, peak = stage.first_seconds.get(name), stage.peak_bytes.get(name)
        return [
            _cell(key[0]),
            str(key[1] or ""),
            f"{speed[key]:.1f}",
            *(_ratio(each.get(key, nan)) for each in against),
            f"{summary.mat:.2f}",
            "" if summary.equal is None else f"{summary.equal} of {summary.samples}",
            "" if seconds is None else f"{seconds:.1f}",
            "" if peak is None else f"{peak / 2**30:.1f}",
        ]

    return table(list(_COLUMNS), (row(*each) for each in methods.items()))


_COLUMNS = (
    "method",
    "nodes",
    "tokens/s",
    "against plain",
    "against plain, compiled",
    "MAT",
    "texts equal",
    "warm-up, s",
    "memory, GiB",
)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _ratio(ratio: float) -> str:
    return "" if isnan(ratio) else f"{ratio:.2f}x"
