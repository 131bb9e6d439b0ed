"""The plot of a run: how many times as fast each method is, and its MAT."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

from ..shared.comparison import Comparison

ACCENT, NEUTRAL, TEXT = "#0072B2", "#B4BAC1", "#24292F"
LABEL = 36  # characters of a line of a method's name


def plot_speed_ups(comparison: Comparison, path: Path) -> None:
    """Draws a bar for each method, the fastest on top, with the bounds of its speed-up."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    gains = {name: comparison.gain(name) for name in comparison.calls}
    names = sorted(gains, key=lambda name: gains[name].ratio)
    with rc_context({"font.size": 9, "text.color": TEXT, "savefig.dpi": 200}):
        figure = Figure(figsize=(8, 0.42 * len(names) + 1), layout="constrained")
        axes = figure.subplots()
        for row, name in enumerate(names):
            gain = gains[name]
            ours = "candidate_generator" in comparison.methods[name]
            axes.barh(row, gain.ratio, height=0.62, color=ACCENT if ours else NEUTRAL)
            axes.plot([gain.low, gain.high], [row, row], color=TEXT, linewidth=1.3)
            figures = f"{gain.ratio:.2f}x, MAT {comparison.mat(name):.2f}"
            right = axes.get_yaxis_transform()  # x in widths of the axes
            axes.text(1.02, row, figures, transform=right, va="center")
        axes.set_yticks(range(len(names)), [fill(name, LABEL) for name in names])
        axes.axvline(1, color=TEXT, linewidth=0.8, linestyle="--")
        axes.spines[["top", "right"]].set_visible(False)
        prompts = len(comparison.calls[comparison.first])
        axes.set_xlabel(f"times as fast as {comparison.first}, {prompts} prompts")
        figure.savefig(path)
