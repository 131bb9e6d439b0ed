"""A draft tree as a drawing: what was verified in one forward pass, and what was accepted."""

from __future__ import annotations

from collections import defaultdict
from html import escape
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from ...drafting.tree import ROOT
from .steps import Step
from .style import source_class

_ROW, _BOX, _GAP, _MARGIN = 30, 22, 34, 10  # pixels: a row, a box in it, between columns, around
_CHARACTER = 7.3  # pixels of the drawing's type
_LONGEST = 16  # characters of a token


class _Place(NamedTuple):
    """The left and right end of a box, and its middle from above."""

    left: float
    right: float
    middle: float


def tree_html(
    step: Step, before: str, sources: list[str], tokenizer: PreTrainedTokenizerBase
) -> str:
    """The tree from left to right, accepted nodes in the first row, each in its source's colour.

    Args:
        step ([`Step`]): The forward pass.
        before (`str`): The token that the tree grew from.
        sources (`list[str]`): The names of the blend's sources.
        tokenizer (`PreTrainedTokenizerBase`): Decodes the tokens.
    """
    tree, path, owners = step.tree, step.accepted(), step.sources()
    # Behind the tree's nodes stands the target's own token, a child of the last accepted one.
    own = len(tree)
    parents = [*tree.parents.tolist(), path[-1] if path else ROOT]
    probs = [*tree.probs.tolist(), 1.0]
    texts = [visible(tokenizer.decode([t])) for t in [*tree.tokens.tolist(), step.tokens[-1]]]
    places = _places(parents, probs, [*path, own], [*texts, visible(before)])

    boxes = [_box(places[ROOT], visible(before), "root", "the last token before")]
    lines = []
    for node, parent in enumerate(parents):
        kind = "own" if node == own else "accepted" if node in path else "rejected"
        lines.append(_line(places[parent], places[node], kind))
        if node == own:
            boxes.append(_box(places[node], texts[node], kind, "the model's own token"))
            continue
        percent = f"{100 * probs[node]:.0f}"
        about = f"{sources[owners[node]]}, {percent} %, {kind}"
        kind = f"{kind} {source_class(owners[node])}"
        boxes.append(_box(places[node], texts[node], kind, about, percent))
    width = max(place.right for place in places.values()) + _GAP
    height = max(place.middle for place in places.values()) + _ROW / 2 + _MARGIN
    return (
        f'<div class="tree" tabindex="0"><svg width="{width:.0f}" height="{height:.0f}" role="img" '
        f'aria-label="draft tree">{"".join(lines)}{"".join(boxes)}</svg></div>'
    )


def step_html(
    number: int, steps: list[Step], sources: list[str], tokenizer: PreTrainedTokenizerBase
) -> str:
    """A step's figures, and its tree.

    Args:
        number (`int`): From 1 on; the first one is the prefill, which verifies no draft.
        steps (`list[Step]`): All of the answer.
        sources (`list[str]`): The names of the blend's sources.
        tokenizer (`PreTrainedTokenizerBase`): Decodes the tokens.
    """
    step = steps[number - 1]
    before = tokenizer.decode([steps[number - 2].tokens[-1]]) if number > 1 else "prompt"
    accepted, text = len(step.accepted()), visible(tokenizer.decode(step.tokens))
    noun = "draft token" if len(step.tree) == 1 else "draft tokens"
    drafted = f"{len(step.tree)} {noun} verified, {accepted} accepted"
    if number == 1:
        drafted = "the prompt is read, nothing is drafted yet"
    elif not len(step.tree):
        drafted = "no draft, a step of plain decoding"
    return (
        f'<div class="rs step"><p>Forward pass {number} of {len(steps)}: {drafted}. '
        f"New text: <code>{escape(text)}</code></p>"
        f"{tree_html(step, before, sources, tokenizer)}"
        '<p class="quiet">From left to right: the last token, the draft tree with the probability '
        "of each node in percent, the accepted path in bold, and, dashed, the token that the model "
        "chose itself after it. A space is shown as ·, the end of a line as ⏎.</p></div>"
    )


def visible(text: str) -> str:
    """A token's text with spaces and ends of lines that can be seen."""
    for one, other in ((" ", "·"), ("\n", "⏎"), ("\t", "⇥")):
        text = text.replace(one, other)
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def _places(
    parents: list[int], probs: list[float], path: list[int], texts: list[str]
) -> dict[int, _Place]:
    """Where each node's box is, and the root's, whose text is the last of all.

    A node's best child stands in its row, and that of the accepted path is the best.
    """
    children = defaultdict(list)
    for node, parent in enumerate(parents):
        children[parent].append(node)
    rows, depths, row = {}, {ROOT: 0}, 0
    waiting = [ROOT]
    while waiting:
        node = waiting.pop()
        rows[node] = row
        best_last = sorted(children[node], key=lambda child: (child in path, probs[child]))
        depths.update((child, depths[node] + 1) for child in best_last)
        waiting += best_last
        row += not best_last  # what comes after a leaf begins a row
    widths = [0.0] * (max(depths.values()) + 1)
    for node, depth in depths.items():
        widths[depth] = max(widths[depth], _width(texts[node]))
    lefts = [_MARGIN + sum(widths[:depth]) + _GAP * depth for depth in range(len(widths))]
    return {
        node: _Place(
            lefts[depth], lefts[depth] + _width(texts[node]), _MARGIN + _ROW * (rows[node] + 0.5)
        )
        for node, depth in depths.items()
    }


def _width(text: str) -> float:
    return 14 + _CHARACTER * min(len(text), _LONGEST)


def _line(start: _Place, end: _Place, kind: str) -> str:
    bend = (start.right + end.left) / 2
    return (
        f'<path class="{kind}" d="M{start.right:.0f},{start.middle:.0f} C{bend:.0f},'
        f'{start.middle:.0f} {bend:.0f},{end.middle:.0f} {end.left:.0f},{end.middle:.0f}"/>'
    )


def _box(place: _Place, text: str, kind: str, about: str, percent: str = "") -> str:
    short = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    y = place.middle
    return (
        f'<g class="{kind}"><title>{escape(text)}: {escape(about)}</title>'
        f'<rect x="{place.left:.0f}" y="{y - _BOX / 2:.0f}" '
        f'width="{place.right - place.left:.0f}" height="{_BOX}" rx="5"/>'
        f'<text x="{place.left + 7:.0f}" y="{y + 4:.0f}">{escape(short)}</text>'
        f'<text class="percent" x="{place.right + 3:.0f}" y="{y - 3:.0f}">{percent}</text></g>'
    )
