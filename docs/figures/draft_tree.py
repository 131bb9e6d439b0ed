"""Draws a real draft tree and its attention mask: python docs/figures/draft_tree.py

SmolLM2-135M-Instruct writes a function again; of all draft trees on the way the one with the most
branches is drawn.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import numpy as np

import hf_refspec as rs
from hf_refspec.apps.shared.loading import load_model, load_tokenizer
from hf_refspec.apps.shared.prompts import chat_inputs, user

FOLDER = Path(__file__).parent
NODES = 14
PROMPT = """Add a discount to this function. Answer with the code only.

def compute(items, tax):
    amount = 0
    for item in items:
        amount += item.price * item.count
    return amount * (1 + tax)
"""
ACCEPTED, REJECTED, LINE, TEXT = "#3f51b5", "#b0b4c3", "#9094a6", "#22242e"
FONT = "font-family='ui-monospace, Menlo, Consolas, monospace'"


class Recorder(rs.Blend):
    """Keeps each tree that was verified, and the tokens that came of it."""

    def begin(self, prompt_ids, vocab_size):
        super().begin(prompt_ids, vocab_size)
        self.steps, self.last = [], int(prompt_ids[-1])

    def observe(self, observation):
        super().observe(observation)
        self.steps.append((self.last, observation.verified, observation.tokens))
        self.last = int(observation.tokens[-1])


def record() -> tuple[list, rs.Drafter]:
    """The steps of a call, and how to write its tokens."""
    model = load_model(device_map="cpu")
    tok = load_tokenizer()
    drafter = Recorder([rs.ReferenceCopy(), rs.TokenRecycling()])
    prompt = chat_inputs(tok, [user(PROMPT)])
    options = {"do_sample": False, "max_new_tokens": 96, "max_draft_tokens": NODES}
    for _ in range(2):  # the second time there is something to recycle
        model.generate(**prompt, **options, candidate_generator=drafter)
        prompt = chat_inputs(tok, [user(PROMPT.replace("discount", "fee"))])
    return drafter.steps, tok


def branches(step: tuple) -> tuple[int, int]:
    """How good a figure a step would make: its branches, then its accepted tokens."""
    _, tree, tokens = step
    accepted = len(tokens) - 1
    leaves = len(tree) - len(set(tree.parents.tolist()) - {-1})
    return (min(leaves, 5) if len(tree) == NODES and 3 <= accepted <= 6 else 0, accepted)


def label(tok, token: int) -> str:
    """A token as it is shown: spaces and ends of lines are made visible."""
    text = tok.decode([token]).replace("\n", "⏎").replace(" ", "␣")
    return escape(text if len(text) <= 9 else text[:8] + "…")


def draw_tree(tok, root: int, tree: rs.DraftTree, accepted: set[int], after: int) -> str:
    """The tree from left to right, a leaf a row."""
    children = [[] for _ in range(len(tree) + 1)]  # the root's stand last
    for node, parent in enumerate(tree.parents.tolist()):
        children[parent].append(node)
    rows, free = {}, iter(range(len(tree) + 1))

    def place(node: int) -> None:
        for child in children[node]:
            place(child)
        below = [rows[child] for child in children[node]]
        rows[node] = below[0] if below else next(free)

    place(-1)
    depths = {-1: 0, **dict(enumerate(tree.depths().tolist()))}
    x = {node: 20 + 112 * depth for node, depth in depths.items()}
    y = {node: 24 + 40 * row for node, row in rows.items()}
    shapes = []
    for node, parent in enumerate(tree.parents.tolist()):
        colour, width = (ACCEPTED, 2.5) if node in accepted else (LINE, 1.2)
        middle = x[parent] + 94
        shapes.append(
            f"<path d='M{x[parent] + 88} {y[parent]} H{middle} V{y[node]} H{x[node]}' fill='none' "
            f"stroke='{colour}' stroke-width='{width}'/>"
        )
    for node in x:
        token = root if node < 0 else int(tree.tokens[node])
        known = node < 0 or node in accepted
        style = f"fill='{ACCEPTED}'" if known else f"fill='white' stroke='{REJECTED}'"
        ink = "white" if known else TEXT
        shapes.append(
            f"<rect x='{x[node]}' y='{y[node] - 14}' width='88' height='28' rx='6' {style}/>"
            f"<text x='{x[node] + 44}' y='{y[node] + 5}' text-anchor='middle' fill='{ink}'>"
            f"{label(tok, token)}</text>"
        )
    width, height = max(x.values()) + 108, max(y.values()) + 62
    shapes.append(
        f"<text x='20' y='{height - 14}' fill='{TEXT}'>{len(accepted)} of {len(tree)} nodes "
        f"accepted; the same pass gives the token after them: {label(tok, after)}</text>"
    )
    return svg(width, height, shapes)


def draw_mask(tok, root: int, tree: rs.DraftTree, accepted: set[int]) -> str:
    """Which tokens of the pass each of them sees: the text so far, the root, its own path."""
    size, left, top = 24, 116, 116
    count = len(tree) + 1
    sees = np.zeros((count, count), dtype=bool)
    sees[:, 0], sees[1:, 1:] = True, tree.ancestors()
    tokens, shapes = [root, *tree.tokens.tolist()], []
    shapes.append(
        f"<rect x='{left}' y='{top}' width='{2 * size}' height='{count * size - 2}' rx='3' "
        f"fill='{LINE}'/><text x='{left + size}' y='{top - 10}' fill='{TEXT}' "
        f"transform='rotate(-60 {left + size} {top - 10})'>the text so far</text>"
    )
    for i, token in enumerate(tokens):
        known = i == 0 or i - 1 in accepted
        ink = ACCEPTED if known else TEXT
        across, down = left + (i + 2) * size, top + i * size
        shapes.append(
            f"<text x='{left - 8}' y='{down + 16}' text-anchor='end' fill='{ink}'>"
            f"{label(tok, token)}</text><text x='{across + 14}' y='{top - 10}' fill='{ink}' "
            f"transform='rotate(-60 {across + 14} {top - 10})'>{label(tok, token)}</text>"
        )
        for j in range(count):
            fill = (ACCEPTED if known else LINE) if sees[i, j] else "#eceef3"
            shapes.append(
                f"<rect x='{left + (j + 2) * size}' y='{down}' width='{size - 2}' "
                f"height='{size - 2}' rx='3' fill='{fill}'/>"
            )
    return svg(left + (count + 2) * size + 70, top + count * size + 16, shapes)


def svg(width: int, height: int, shapes: list[str]) -> str:
    """A picture on a white ground, so that it can be read on any."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' "
        f"{FONT} font-size='13'><rect width='{width}' height='{height}' rx='10' fill='white'/>\n"
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def main() -> None:
    """Writes both figures."""
    steps, tok = record()
    root, tree, tokens = max(steps, key=branches)
    accepted = {*tree.along(tokens[:-1].tolist())}
    figures = {
        "draft_tree.svg": draw_tree(tok, root, tree, accepted, int(tokens[-1])),
        "draft_mask.svg": draw_mask(tok, root, tree, accepted),
    }
    for name, figure in figures.items():
        (FOLDER / name).write_text(figure, encoding="utf-8")


if __name__ == "__main__":
    main()
