"""The plots, as PNG files: opaque, 1,600 pixels wide, shown at half their width."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import isnan
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

from .methods import LOOK_UP, PLAIN
from .summary import Entry, Key, Summary, retrieves, suites_by_dtype, summaries

WIDTH = 8  # inches
# Okabe and Ito's colours, which the colour-blind can tell apart.
ACCENT, DARK, ORANGE, GREEN = "#0072B2", "#7A8692", "#D55E00", "#009E73"
NEUTRAL, GRID, TEXT = "#B4BAC1", "#E4E7EA", "#24292F"
COLORS = {"plain or transformers'": NEUTRAL, "published algorithms": DARK, "hf_refspec": ACCENT}
MARKERS = "os^D"  # so that lines differ without colour too
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": NEUTRAL,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": NEUTRAL,
    "ytick.color": NEUTRAL,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "lines.linewidth": 1.3,
    "lines.solid_capstyle": "butt",
}
NAMED = 2  # suites in the title of a panel
LABEL = 40  # characters of a line of a method's name
TITLE = 80  # of a panel's title, over the whole width
BESIDE = {"speed-up": 44, "MAT": 74}  # columns of numbers, in points from the axes


def charts(results: dict[str, Any]) -> dict[str, dict[str, list[Entry]]]:
    """The entries of each panel of each chart, by file and title.

    One chart has all suites without retrieval, a panel for each dtype. The others have a chart for
    each kind, a panel for each suite, without the methods that do not retrieve.
    """
    files: dict[str, dict[str, list[Entry]]] = {}
    for dtype, suites in suites_by_dtype(results["suites"]).items():
        names = ", ".join(suites) if len(suites) <= NAMED else f"{len(suites)} suites"
        entries = [entry for of_suite in suites.values() for entry in of_suite]
        files.setdefault("speed_ups.png", {})[f"{names}, {dtype}"] = entries
    for name, suite in results["suites"].items():
        if retrieves(suite["entries"]):
            kind = suite["suite"].partition(",")[0]
            files.setdefault(f"speed_ups_{kind}.png", {})[name] = [
                {**entry, "samples": [each for each in entry["samples"] if each["figures"]]}
                for entry in suite["entries"]
            ]
    return files


@contextmanager
def new_figure(path: Path, height: float) -> Iterator[Any]:
    """A figure of `height` inches to draw on, which is then written to a file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure
        figure.savefig(path)


def line_legend(figure: Any, axes: Any) -> None:
    """Adds a legend above the axes, where it hides no data."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3)


def kind(method: str) -> str:
    """Whose method it is: one of `COLORS`."""
    if method in (PLAIN, LOOK_UP, "baseline"):
        return "plain or transformers'"
    published = method.startswith("as published") or method.endswith("'s algorithm")
    return "published algorithms" if published else "hf_refspec"


def speed_up_title(chart: dict[str, list[Entry]]) -> str:
    """The title of a chart of these panels."""
    return f"Speed-up in decoding over {next(iter(chart.values()))[0]['samples'][0]['method']}"


def plot_speed_ups(chart: dict[str, list[Entry]], path: Path) -> None:
    """Draws the decoding speed-up of each method as a bar with its quartiles, the fastest on top,
    with the speed-up and MAT beside it; a panel for each title."""
    panels = {
        f"{title}, {len(entries)} prompt{'s' * (len(entries) > 1)}": summaries(entries)
        for title, entries in chart.items()
    }
    keys = _fastest_first(list(panels.values()))
    labels = [_label(*key) for key in keys]
    lines = sum(label.count("\n") + 1.6 for label in labels)
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    with new_figure(path, rows * (0.16 * lines + 0.7) + 0.6) as figure:
        grid = figure.subplots(rows, columns, sharey=True, sharex=True, squeeze=False).flatten()
        for axes, (panel, methods) in zip(grid, panels.items(), strict=False):
            axes.set_title(fill(panel, TITLE // columns), pad=16)
            axes.tick_params(axis="x", labelbottom=True)  # in all rows of panels
            _draw_bars(axes, keys, methods)
        for axes in grid[len(panels) :]:
            axes.axis("off")
        grid[0].set_yticks(range(len(keys)), labels)
        grid[0].locator_params(axis="x", min_n_ticks=3)
        grid[0].xaxis.set_major_formatter("{x:g}x")
        grid[0].set(xlim=(0, None), ylim=(len(keys) - 0.4, -0.6))
        title = f"{speed_up_title(chart)}: median and quartiles over the prompts"
        figure.supxlabel(title, fontsize=9)
        _color_legend(figure, {kind(name) for name, _ in keys})


def _fastest_first(panels: list[dict[Key, Summary]]) -> list[Key]:
    """The methods of all panels by the mean of their medians; those without one at the end."""

    def order(key: Key) -> float:
        medians = [methods[key].decoding_speed_up.median for methods in panels if key in methods]
        return -fmean([each for each in medians if not isnan(each)] or [0.0])

    return sorted(dict.fromkeys(key for methods in panels for key in methods), key=order)


def _label(name: str, nodes: int | str) -> str:
    about = {"auto": ", auto", 0: ""}.get(nodes, f", {nodes}\N{NO-BREAK SPACE}nodes")
    return fill(name + about, LABEL, break_long_words=False)


def _draw_bars(axes: Any, keys: list[Key], methods: dict[Key, Summary]) -> None:
    """Draws a bar for each method that was measured, and its median and MAT beside the axes."""
    from matplotlib.patheffects import withStroke

    def beside(column: str, y: float, text: str, **options: Any) -> None:
        right = axes.get_yaxis_transform()  # x in widths of the axes, y in rows
        at = {"xycoords": right, "textcoords": "offset points", "annotation_clip": False}
        offset = BESIDE[column], 0
        axes.annotate(text, (1, y), offset, ha="right", va="center_baseline", **at, **options)

    for column in BESIDE:
        beside(column, -1, column, fontsize=7.5)
    for y, key in enumerate(keys):
        if key not in methods:
            continue
        spread = methods[key].decoding_speed_up
        beside("speed-up", y, "–" if isnan(spread.median) else f"{spread.median:.2f}x")
        beside("MAT", y, f"{methods[key].mat:.2f}")
        if not isnan(spread.median):
            axes.barh(y, spread.median, height=0.62, color=COLORS[kind(key[0])])
            halo = [withStroke(linewidth=2.4, foreground="white")]
            axes.plot([spread.low, spread.high], [y, y], color=TEXT, path_effects=halo)
    axes.axvline(1, color=TEXT, linewidth=0.8, linestyle="--")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def _color_legend(figure: Any, kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=color, label=each) for each, color in COLORS.items() if each in kinds]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches))
