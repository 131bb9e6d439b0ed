"""The plots, as PNG files: speed-ups, the settings of token recycling, sizes of a datastore."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

from .methods import DEFAULTS, recycling_settings
from .style import ACCENT, COLORS, DARK, GREEN, MARKERS, ORANGE, TEXT, kind, new_figure
from .summary import Key, Summary

LABEL = 40  # characters of a line of a method's name
TITLE = 80  # of a panel's title, over the whole width
BESIDE = {"speed-up": 44, "MAT": 74}  # columns of numbers, in points from the axes on


def plot_speed_ups(panels: dict[str, dict[Key, Summary]], title: str, path: Path) -> None:
    """Draws the speed-up of each method in decoding as a bar with its quartiles, the fastest on
    top, with the number and MAT beside it.

    Args:
        panels (`dict[str, dict[Key, Summary]]`): The title of each panel, and its methods.
        title (`str`): What the bars show.
        path (`Path`): The file to write.
    """
    keys = _fastest_first(list(panels.values()))
    labels = [_label(*key) for key in keys]
    lines = sum(label.count("\n") + 1.6 for label in labels)
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    with new_figure(path, rows * (0.16 * lines + 0.7) + 0.6) as figure:
        grid = figure.subplots(rows, columns, sharey=True, sharex=True, squeeze=False).flatten()
        for axes, (panel, methods) in zip(grid, panels.items(), strict=False):
            axes.set_title(fill(panel, TITLE // columns), pad=16)
            axes.tick_params(axis="x", labelbottom=True)  # not of the lowest panels only
            _draw_bars(axes, keys, methods)
        for axes in grid[len(panels) :]:
            axes.axis("off")
        grid[0].set_yticks(range(len(keys)), labels)
        grid[0].locator_params(axis="x", min_n_ticks=3)
        grid[0].xaxis.set_major_formatter("{x:g}x")
        grid[0].set(xlim=(0, None), ylim=(len(keys) - 0.4, -0.6))
        figure.supxlabel(f"{title}: median and quartiles over the prompts", fontsize=9)
        _color_legend(figure, {kind(name) for name, _ in keys})


def _fastest_first(panels: list[dict[Key, Summary]]) -> list[Key]:
    """The methods of all panels by the mean of their medians; those without one at the end."""

    def order(key: Key) -> float:
        medians = [methods[key].decoding_speed_up.median for methods in panels if key in methods]
        return -fmean([each for each in medians if not isnan(each)] or [0.0])

    return sorted(dict.fromkeys(key for methods in panels for key in methods), key=order)


def _label(name: str, nodes: int | str) -> str:
    # With a space that does not break.
    about = {"auto": ", auto", 0: ""}.get(nodes, f", {nodes}\N{NO-BREAK SPACE}nodes")
    return fill(name + about, LABEL, break_long_words=False)


def _draw_bars(axes: Any, keys: list[Key], methods: dict[Key, Summary]) -> None:
    """A bar for each key that was measured; beside the axes its median and its MAT."""
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


def plot_settings(suites: dict[str, dict[Key, Summary]], path: Path) -> None:
    """Draws the MAT of each setting of token recycling, a panel for each option, a line for each
    suite; that of the defaults is a dotted line."""
    settings = recycling_settings()
    widths = [max(len(methods), 3.6) for methods in settings.values()]
    with new_figure(path, 3) as figure:
        panels = figure.subplots(1, len(settings), sharey=True, width_ratios=widths)
        for axes, (option, methods) in zip(panels, settings.items(), strict=True):
            looks = zip((ACCENT, ORANGE, GREEN), MARKERS, strict=False)
            for (suite, summaries), (color, marker) in zip(suites.items(), looks, strict=False):
                mats = [summaries[method.name, method.nodes].mat for method in methods.values()]
                axes.plot(list(methods), mats, color=color, marker=marker, label=suite)
                axes.axhline(summaries[DEFAULTS].mat, linestyle=":", color=color)
            axes.set_title(option)
            axes.margins(x=0.5 / len(methods))
            axes.tick_params(axis="x", labelsize=8)
        panels[0].set(ylabel="MAT (dotted: the defaults)")
        _line_legend(figure, panels[0])


def plot_sizes(forms: dict[str, list[tuple[float, float]]], path: Path) -> None:
    """Draws MAT against the megabytes of a datastore, a line for each of its forms."""
    from matplotlib.ticker import LogLocator

    with new_figure(path, 4) as figure:
        axes = figure.subplots()
        looks = zip((DARK, ACCENT, ORANGE), MARKERS, strict=False)  # the published one in grey
        for (form, points), (color, marker) in zip(forms.items(), looks, strict=True):
            axes.plot(*zip(*points, strict=True), color=color, marker=marker, label=form)
        axes.set(xscale="log", xlabel="size of the datastore, MB", ylabel="MAT")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        _line_legend(figure, axes)


def _line_legend(figure: Any, axes: Any) -> None:
    """Above the axes, where no data are."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3)
