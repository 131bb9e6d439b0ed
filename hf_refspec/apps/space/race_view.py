"""A conversation as HTML: messages, and the two texts of each race in their sources' colours."""

from __future__ import annotations

from collections import Counter
from html import escape
from itertools import groupby

from .conversation import Conversation
from .race import Lane, Race

_EXPLANATIONS = {
    "ReferenceCopy": "copied from the document, the messages and the answers so far",
    "TokenRecycling": "what the model itself expected in similar places before",
    "DatastoreDrafts": "looked up in the datastore",
}
_EMPTY = (
    '<div class="empty">Choose an example, or type a message. Plain and drafted decoding race side '
    "by side.</div>"
)


def source_class(source: int) -> str:
    """The CSS class of a blend's source, by its index; style.css has colours for five."""
    return f"s{source % 5}"


def conversation_html(conversation: Conversation, error: str = "", wait: str = "") -> str:
    """All messages and answers, both columns of the last one and what it waits for, and an error at
    the end."""
    parts = []
    for number, (message, race) in enumerate(conversation.turns, 1):
        parts.append(f'<div class="message">{escape(message)}</div>')
        if number < len(conversation.turns):  # an earlier answer: the drafted text alone
            text = f'<div class="text">{_text(race.drafted)}</div>'
            parts.append(f'<div class="lane drafted">{text}</div>{_verdict(race)}')
            continue
        lanes = _lane("Plain", race.plain, race) + _lane("Drafted", race.drafted, race)
        parts.append(f'<div class="lanes">{lanes}</div>{_legend(race)}{_verdict(race, wait)}')
    if error:
        parts.append(f'<div class="error" role="alert">{escape(error)}</div>')
    return f'<div class="rs">{"".join(parts) or _EMPTY}</div>'


def _lane(title: str, lane: Lane, race: Race) -> str:
    width = 100 * (1.0 if lane.completed else len(lane.ids) / race.max_new_tokens)
    figures = (
        f"{len(lane.ids)} tokens",
        f"{lane.passes} passes",
        f"MAT {lane.mat:.2f}",
        f"{lane.seconds:.1f} s",
    )
    return (
        f'<div class="lane {title.lower()}"><header><span>{title}</span>'
        f'<span class="rate"><b>{lane.rate:.1f}</b> tokens/s</span></header>'
        f'<div class="bar"><i style="width:{width:.1f}%"></i></div>'
        f'<div class="text">{_text(lane)}</div>'
        f'<div class="figures">{"".join(f"<span>{each}</span>" for each in figures)}</div></div>'
    )


def _legend(race: Race) -> str:
    """The colours: which source drafted how many of the tokens."""
    counts = Counter(owner for _, owner in race.drafted.pieces[: len(race.drafted.ids)])
    parts = [
        f'<span><span class="{source_class(i)}" title="{_EXPLANATIONS.get(name, "")}">{name}</span>'
        f" {counts[i]}</span>"
        for i, name in enumerate(race.sources)
    ]
    own = f"<span>the model itself {counts[None]}</span>"
    return f'<div class="legend">{"".join(parts)}{own}</div>'


def _text(lane: Lane) -> str:
    """The text, neighbouring tokens of one source in one span."""
    parts = []
    for owner, pieces in groupby(list(lane.pieces), key=lambda piece: piece[1]):
        text = escape("".join(text for text, _ in pieces))
        start = "" if owner is None else f'<span class="{source_class(owner)}">'
        parts.append(f"{start}{text}{'</span>' if start else ''}")
    return "".join(parts)


def _verdict(race: Race, wait: str = "") -> str:
    """Whether the texts are the same, and how much faster the drafted one came."""
    position, kind = race.first_difference(), ""
    if position is not None:
        verdict, kind = f"The texts differ from token {position + 1} on.", " differs"
    elif race.finished:
        verdict, kind = f"The same text: all {len(race.plain.ids)} tokens are equal.", " same"
    elif race.plain.finished and race.drafted.finished:
        count = min(len(race.plain.ids), len(race.drafted.ids))
        verdict = f"Stopped; the first {count} tokens are equal."
    else:
        verdict = "" if race.speedup else wait or "Reading the prompt …"
    gain = f" {race.speedup:.2f}x the speed of plain decoding." if race.speedup else ""
    return f'<p class="verdict{kind}">{verdict}{gain}</p>'
