"""Plots as PNG files, by matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .methods import DEFAULTS, recycling_settings
from .summary import Key, Summary


def check_plotting() -> None:
    """Checks before the work starts that its result can be plotted.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError(
            'hf-refspec bench plots with matplotlib: pip install "hf_refspec[bench]"'
        ) from None


@contextmanager
def new_plot(path: Path, panels: int = 1) -> Iterator[Any]:
    """Axes to draw on, one for each panel, which are then written to a file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (7, 4.5) if panels == 1 else (2.5 * panels, 3.5)
    figure, drawn = pyplot.subplots(1, panels, figsize=size, sharey=True, squeeze=False)
    try:
        yield drawn[0]
        for axes in drawn[0]:
            axes.grid(alpha=0.3)
        if panels == 1:
            drawn[0][0].legend()
        else:  # above all of them: a panel is narrow
            labelled = drawn[0][0].get_legend_handles_labels()
            figure.legend(*labelled, loc="lower center", bbox_to_anchor=(0.5, 0.95), ncols=4)
        figure.savefig(path, dpi=150, bbox_inches="tight")
    finally:
        pyplot.close(figure)


def plot_speed_ups(suites: dict[str, dict[Key, Summary]], path: Path) -> None:
    """Draws each method's speed-up in decoding, with its quartiles, a colour for each suite."""
    with new_plot(path) as (axes,):
        labels = list(dict.fromkeys(_label(key) for methods in suites.values() for key in methods))
        for i, (suite, methods) in enumerate(suites.items()):
            spreads = [methods[key].decoding_speed_up for key in methods]
            axes.errorbar(
                [each.median for each in spreads],
                [labels.index(_label(key)) + 0.6 * i / len(suites) for key in methods],
                xerr=[
                    [each.median - each.low for each in spreads],
                    [each.high - each.median for each in spreads],
                ],
                fmt="o",
                label=suite,
            )
        axes.set(xlabel="speed-up in decoding, median and quartiles", xlim=(0, None))
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()


def plot_settings(suites: dict[str, dict[Key, Summary]], path: Path) -> None:
    """Draws the MAT of each setting of token recycling, a panel for each option; that of the
    defaults is a dotted line."""
    settings = recycling_settings()
    with new_plot(path, len(settings)) as panels:
        for axes, (option, methods) in zip(panels, settings.items(), strict=True):
            for suite, summaries in suites.items():
                mats = [summaries[method.name, method.nodes].mat for method in methods.values()]
                [line] = axes.plot(list(methods), mats, marker="o", label=suite)
                axes.axhline(summaries[DEFAULTS].mat, linestyle=":", color=line.get_color())
            axes.set(xlabel=option)
        panels[0].set(ylabel="MAT")


def _label(key: Key) -> str:
    name, nodes = key
    return f"{name}, {nodes}" if nodes else name
