"""Tables and progress bars in notebooks."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from html import escape

COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00")  # of a blend's sources, in order


def html_table(
    rows: Iterable[tuple[str, object]], colored: Iterable[tuple[str, object]] = ()
) -> str:
    """A table of names and figures, the last rows in the colours of a blend's sources."""
    styles = [(row, "") for row in rows]
    for number, row in enumerate(colored):
        styles.append((row, f' style="border-bottom:2px solid {COLORS[number % len(COLORS)]}"'))
    lines = (
        f'<tr><th style="text-align:left"><span{style}>{escape(name)}</span></th>'
        f'<td style="text-align:left">{escape(str(value))}</td></tr>'
        for (name, value), style in styles
    )
    return f"<table>{''.join(lines)}</table>"


def is_hidden(progress: bool) -> bool | None:
    """`disable` of a tqdm bar, which is shown in a terminal or a notebook, and not in a log."""
    return not progress or (False if "ipykernel" in sys.modules else None)
