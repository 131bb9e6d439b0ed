"""A conversation as HTML: the two texts of each race, and the draft tree of one forward pass."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from html import escape
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ...drafting.copied_spans import CopiedSpan
from ...drafting.tree import ROOT
from ...messages import counted
from ...notebooks import spans
from .conversation import Conversation, Lane, Race, RacePass

_EXPLANATIONS = {
    "ReferenceCopy": "copied from the document, the messages and the answers so far",
    "TokenRecycling": "expected by the model itself in similar places before",
    "DatastoreDrafts": "looked up in the datastore",
}
_EMPTY = (
    '<div class="empty">Choose an example above, or send a message. Plain and drafted decoding '
    "race side by side.</div>"
)
_ROW = 30  # pixels, the height of a row
_BOX = 22  # of a box in it
_GAP = 34  # the width between boxes
_MARGIN = 10
_CHARACTER = 7.3  # the width of a character
_SHOWN_CHARACTERS = 16  # of a token


def source_class(source: int) -> str:
    """The CSS class of a blend's source, by its index; style.css has colours for five."""
    return f"s{source % 5}"


def conversation_html(conversation: Conversation, error: str = "") -> str:
    """All messages and answers, both columns of the last one, and an error at the end."""
    parts = []
    for number, (message, race) in enumerate(conversation.turns, 1):
        parts.append(f'<div class="message">{escape(message)}</div>')
        if number < len(conversation.turns):  # an earlier answer: the drafted text alone
            text = f'<div class="text">{_text(race.drafted, race.copied)}</div>'
            parts.append(f'<div class="lane drafted">{text}</div>{_verdict(race)}')
            continue
        lanes = _lane("Plain", race.plain, race) + _lane("Drafted", race.drafted, race)
        running = "" if race.finished else " running"
        parts.append(f'<div class="lanes{running}">{lanes}</div>{_legend(race)}{_verdict(race)}')
    if error:
        parts.append(f'<div class="error" role="alert">{escape(error)}</div>')
    return f'<div class="rs">{"".join(parts) or _EMPTY}</div>'


def _lane(title: str, lane: Lane, race: Race) -> str:
    width = 100 * (1.0 if lane.completed else len(lane.ids) / race.max_new_tokens)
    tokens = counted(len(lane.ids), "token")
    passes = counted(lane.passes, "pass", "passes")
    copied = race.copied if lane is race.drafted else ()
    counts = f"<span>{tokens}</span><span>{passes}</span>"
    figures = f"{counts}<span>MAT {lane.mat:.2f}</span><span>{lane.seconds:.1f} s</span>"
    return (
        f'<div class="lane {title.lower()}"><header><span>{title}</span>'
        f'<span class="rate"><b>{lane.rate:.1f}</b> tokens/s</span></header>'
        f'<div class="bar"><i style="width:{width:.1f}%"></i></div>'
        f'<div class="text"><span>{_text(lane, copied)}</span></div>'
        f'<div class="figures">{figures}</div></div>'
    )


def _legend(race: Race) -> str:
    """The number of tokens that each source drafted, in its colour."""
    counts = Counter(owner for _, owner in race.drafted.pieces[: len(race.drafted.ids)])
    parts = [
        f'<span><span class="{source_class(i)}" title="{_EXPLANATIONS.get(name, "")}">{name}</span>'
        f" {counts[i]}</span>"
        for i, name in enumerate(race.sources)
    ]
    parts.append(f"<span>the model itself {counts[None]}</span>")
    return f'<div class="legend">{"".join(parts)}</div>'


def _text(lane: Lane, copied: Iterable[CopiedSpan] = ()) -> str:
    """The text, in spans of one source each, with the place that they were copied from."""
    places: dict[int, str] = {}
    for span in copied:
        place = f"{Path(span.source).name}, document {span.document}, from token {span.offset} on"
        places |= dict.fromkeys(range(span.start, span.end), f' title="{escape(place)}"')
    classes = (
        "" if owner is None else f' class="{source_class(owner)}"' for _, owner in lane.pieces
    )
    return spans(
        (text, source + places.get(i, ""))
        for i, ((text, _), source) in enumerate(zip(lane.pieces, classes, strict=True))
    )


def _verdict(race: Race) -> str:
    """Says if the texts are the same, and how much faster the drafted one is."""
    position = race.first_difference()
    kind = ""
    if position is not None:
        verdict = f"The texts differ from token {position + 1} on."
        kind = " differs"
    elif race.completed:
        verdict = f"The same text: {counted(len(race.plain.ids), 'token')}, all equal."
        kind = " same"
    elif race.finished:
        equal = min(len(race.plain.ids), len(race.drafted.ids))
        verdict = f"Stopped; equal so far: {counted(equal, 'token')}."
    else:
        verdict = "" if race.speedup else "Reading the prompt …"
    gain = ""
    if race.speedup:
        factor = f"{race.speedup:.2f}x" if race.finished else f"So far {race.speedup:.1f}x"
        gain = f" {factor} the speed of plain decoding."
    return f'<p class="verdict{kind}">{verdict}{gain}</p>'


def tree_html(
    seen: RacePass, before: str, sources: list[str], tokenizer: PreTrainedTokenizerBase
) -> str:
    """The tree that grows from the token `before` to the right, accepted nodes in the first row."""
    tree = seen.tree
    path = seen.accepted()
    owners = dict(zip(path, seen.owners, strict=False))  # of the accepted nodes
    chosen = len(tree)  # the index of the target's own token, a child of the accepted path
    probs = [*tree.probs.tolist(), 1.0]
    tokens = [*tree.tokens.tolist(), seen.tokens[-1]]
    texts = [*(visible(tokenizer.decode([token])) for token in tokens), visible(before)]
    children = defaultdict(list)
    for node, parent in enumerate([*tree.parents.tolist(), path[-1] if path else ROOT]):
        children[parent].append(node)
    parts = []
    width = 0.0

    def kind_of(node: int) -> str:
        named = {ROOT: "root", chosen: "own"}
        return named.get(node) or ("accepted" if node in path else "rejected")

    def draw(node: int, left: float, row: int) -> int:
        """Draws a node and all nodes below it; returns the first empty row."""
        nonlocal width
        text = texts[node]
        right = left + 14 + _CHARACTER * min(len(text), _SHOWN_CHARACTERS)
        width = max(width, right)
        css_class = kind_of(node)
        percent = ""
        about = "the last token before" if node == ROOT else "the model's own token"
        if node not in (ROOT, chosen):
            percent = f"{100 * probs[node]:.0f}"
            about = f"{percent} %, {css_class}"
            if (owner := owners.get(node)) is not None:
                about = f"{sources[owner]}, {about}"
                css_class += f" {source_class(owner)}"
        short = text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"
        y = _middle(row)
        parts.append(
            f'<g class="{css_class}"><title>{escape(text)}: {escape(about)}</title>'
            f'<rect x="{left:.0f}" y="{y - _BOX / 2:.0f}" width="{right - left:.0f}" '
            f'height="{_BOX}" rx="5"/>'
            f'<text x="{left + 7:.0f}" y="{y + 4:.0f}">{escape(short)}</text>'
            f'<text class="percent" x="{right + 3:.0f}" y="{y - 3:.0f}">{percent}</text></g>'
        )
        accepted = [*path, chosen]
        best = sorted(children[node], key=lambda child: (child not in accepted, -probs[child]))
        for child in best:
            bend = right + _GAP / 2
            end = _middle(row)
            parts.append(
                f'<path class="{kind_of(child)}" d="M{right:.0f},{y:.0f} C{bend:.0f},{y:.0f} '
                f'{bend:.0f},{end:.0f} {right + _GAP:.0f},{end:.0f}"/>'
            )
            row = draw(child, right + _GAP, row)
        return row if best else row + 1

    height = _middle(draw(ROOT, _MARGIN, 0)) - _ROW / 2 + _MARGIN
    return (
        f'<div class="tree" tabindex="0"><svg width="{width + _GAP:.0f}" height="{height:.0f}" '
        f'role="img" aria-label="draft tree">{"".join(parts)}</svg></div>'
    )


def _middle(row: int) -> float:
    return _MARGIN + _ROW * (row + 0.5)


def pass_html(
    number: int, passes: list[RacePass], sources: list[str], tokenizer: PreTrainedTokenizerBase
) -> str:
    """The figures of a pass, by its number from 1 on, and its tree; the first is the prefill."""
    seen = passes[number - 1]
    before = tokenizer.decode([passes[number - 2].tokens[-1]]) if number > 1 else "prompt"
    verified = counted(len(seen.tree), "draft token")
    drafted = f"{verified} verified, {len(seen.accepted())} accepted"
    if number == 1:
        drafted = "the prompt is read, nothing is drafted yet"
    elif not len(seen.tree):
        drafted = "no draft, a step of plain decoding"
    return (
        f'<div class="rs step"><p>Forward pass {number} of {len(passes)}: {drafted}. '
        f"New text: <code>{escape(visible(tokenizer.decode(seen.tokens)))}</code></p>"
        f"{tree_html(seen, before, sources, tokenizer)}"
        '<p class="quiet">From left to right: the last token, the draft tree with the probability '
        "of each node in percent and the accepted path in bold, and, dashed, the token that the "
        "model chose after it. · is a space, ⏎ the end of a line.</p></div>"
    )


def visible(text: str) -> str:
    """A token's text with visible spaces and ends of lines."""
    text = text.translate({ord(" "): "·", ord("\n"): "⏎", ord("\t"): "⇥"})
    return "".join(c if c.isprintable() else "\ufffd" for c in text)
