"""How all plots look: opaque for dark pages as for light ones, 1,600 pixels wide, shown at half."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .methods import BASELINE, LOOK_UP, PLAIN

WIDTH = 8  # inches
# The colours of Okabe and Ito, which the colour-blind tell apart.
ACCENT, DARK, ORANGE, GREEN = "#0072B2", "#7A8692", "#D55E00", "#009E73"
NEUTRAL, GRID, TEXT = "#B4BAC1", "#E4E7EA", "#24292F"
COLORS = {"plain or transformers'": NEUTRAL, "published algorithms": DARK, "hf_refspec": ACCENT}
MARKERS = "os^D"  # a line's marker tells it apart without its colour
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
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.dpi": 200,
    "lines.linewidth": 1.3,
    "lines.solid_capstyle": "butt",
}


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
def new_figure(path: Path, height: float) -> Iterator[Any]:
    """A figure to draw on, which is then written to a file; `height` is in inches."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure
        figure.savefig(path)


def kind(method: str) -> str:
    """Whose method it is: one of `COLORS`."""
    if method in (PLAIN, LOOK_UP, BASELINE):
        return "plain or transformers'"
    published = method.startswith("as published") or method.endswith("'s algorithm")
    return "published algorithms" if published else "hf_refspec"
