"""The plots of a run, as PNG files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .methods import BLEND, BUDGETS, LOOK_UP, LOOK_UP_TOKENS, PLAIN
from .summary import Key, Summary

LONGEST = 20  # accepted tokens that are told apart


def check_plotting() -> None:
    """Refuses to start what could not be plotted in the end.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError(
            "hf-refspec bench plots with matplotlib; install the extra `bench`"
        ) from None


def draw_plots(suites: dict[str, dict[Key, Summary]], folder: Path) -> list[str]:
    """Draws what was measured.

    Args:
        suites (`dict`): Of each suite without retrieval, the summary of each method.
        folder (`Path`): Where the files go.

    Returns:
        Their names.
    """
    if not suites:
        return []
    plots = {
        "accepted_lengths.png": _accepted_lengths,
        "speed_against_budget.png": _speed_against_budget,
    }
    for name, draw in plots.items():
        with new_plot(folder / name) as axes:
            draw(suites, axes)
    return list(plots)


@contextmanager
def new_plot(path: Path) -> Iterator[Any]:
    """Axes to draw on, which are written to a file in the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    try:
        yield axes
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=150, bbox_inches="tight")
    finally:
        pyplot.close(figure)


def _accepted_lengths(suites: dict[str, dict[Key, Summary]], axes: Any) -> None:
    """How many of the forward passes accepted so many draft tokens or more."""
    for name, methods in suites.items():
        counts = np.array(methods[BLEND, BUDGETS[-1]].accepted_lengths)
        fraction = counts[::-1].cumsum()[::-1] / counts.sum()
        none_accepted_more = np.zeros(LONGEST)
        axes.plot(np.append(fraction, none_accepted_more)[: LONGEST + 1], marker=".", label=name)
    axes.set(
        xlabel="accepted draft tokens, at least",
        ylabel="fraction of forward passes",
        title=f"{BLEND}, {BUDGETS[-1]} nodes",
        xticks=range(0, LONGEST + 1, 2),
    )


def _speed_against_budget(suites: dict[str, dict[Key, Summary]], axes: Any) -> None:
    """Tokens a second of the blend with each budget, with "auto", and of prompt look-up."""
    for name, methods in suites.items():
        keys = [(PLAIN, 0), *((BLEND, nodes) for nodes in BUDGETS)]
        speeds = [methods[key].tokens_per_second.median for key in keys]
        [line] = axes.plot([nodes for _, nodes in keys], speeds, marker="o", label=name)
        for key, style in (((BLEND, "auto"), "--"), ((LOOK_UP, LOOK_UP_TOKENS), ":")):
            level = methods[key].tokens_per_second.median
            axes.axhline(level, linestyle=style, color=line.get_color(), linewidth=1)
    axes.set(
        xlabel="draft nodes",
        ylabel="tokens/s in decoding",
        ylim=(0, None),
        title='dashed: "auto"; dotted: prompt look-up',
    )
