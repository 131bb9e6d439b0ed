"""Plots as PNG files, by matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
def new_plot(path: Path) -> Iterator[Any]:
    """Axes to draw on, which are then written to a file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    try:
        yield axes
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=150, bbox_inches="tight")
    finally:
        pyplot.close(figure)


def plot_speed_ups(suites: dict[str, dict[Key, Summary]], path: Path) -> None:
    """Draws each method's speed-up in decoding, with its quartiles, a colour for each suite."""
    with new_plot(path) as axes:
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


def _label(key: Key) -> str:
    name, nodes = key
    return f"{name}, {nodes}" if nodes else name
