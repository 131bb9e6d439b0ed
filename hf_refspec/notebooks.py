"""Tables and progress bars in notebooks."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from html import escape
from itertools import groupby
from operator import itemgetter

COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00")  # of a blend's sources, in order


def colored_by(source: int | None) -> str:
    """The attributes of a `<span>` in the colour of a blend's source, by its number."""
    if source is None:
        return ""
    return f' style="border-bottom:2px solid {COLORS[source % len(COLORS)]}"'


def html_table(
    rows: Iterable[tuple[str, object]], colored: Iterable[tuple[str, object]] = ()
) -> str:
    """A table of names and figures, the last rows in the colours of a blend's sources."""
    styles = [(row, "") for row in rows]
    styles += [(row, colored_by(number)) for number, row in enumerate(colored)]
    lines = (
        f'<tr><th style="text-align:left"><span{style}>{escape(name)}</span></th>'
        f'<td style="text-align:left">{escape(str(value))}</td></tr>'
        for (name, value), style in styles
    )
    return f"<table>{''.join(lines)}</table>"


def spans(pieces: Iterable[tuple[str, str]]) -> str:
    """Pieces of a text, each with the attributes of its `<span>`, or none and an empty string."""
    parts = []
    for attributes, group in groupby(pieces, key=itemgetter(1)):
        text = escape("".join(text for text, _ in group))
        parts.append(f"<span{attributes}>{text}</span>" if attributes else text)
    return "".join(parts)


def is_hidden(progress: bool) -> bool | None:
    """`disable` of a tqdm bar, which is shown in a terminal or a notebook, and not in a log."""
    return not progress or (False if "ipykernel" in sys.modules else None)
