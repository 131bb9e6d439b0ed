"""A draft tree is drawn with every node in a place of its own."""

from __future__ import annotations

import re
from itertools import combinations
from xml.etree import ElementTree

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_refspec.apps.space.race import Step
from hf_refspec.apps.space.views import step_html, tree_html
from hf_refspec.drafting.tree import DraftTree


@st.composite
def steps(draw) -> Step:
    size = draw(st.integers(0, 12))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    tokens = [10 + node for node in range(size)]
    probs: list[float] = []
    for parent in parents:
        probs.append(draw(st.floats(0, 1)) * (probs[parent] if parent >= 0 else 1))
    path, node = [], draw(st.integers(-1, size - 1))
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    arrays = np.array(tokens, np.int64), np.array(parents, np.int32), np.array(probs, np.float32)
    tree = DraftTree(*arrays)
    return Step([*reversed(path), 9], tree, [tree])


def drawn(step: Step, tokenizer) -> ElementTree.Element:
    return ElementTree.fromstring(tree_html(step, "x", ["ReferenceCopy"], tokenizer))


@settings(max_examples=40, deadline=None)
@given(step=steps())
def test_all_nodes_are_drawn_apart_from_each_other_and_the_path_is_straight(step, tokenizer):
    picture = drawn(step, tokenizer)
    boxes = []
    for group in picture.iter("g"):
        rect = group.find("rect")
        x, y, width, height = (float(rect.get(a)) for a in ("x", "y", "width", "height"))
        boxes.append((group.get("class").split()[0], x, y, x + width, y + height))
    kinds = [box[0] for box in boxes]
    assert kinds.count("root") == kinds.count("own") == 1
    assert kinds.count("accepted") == len(step.tokens) - 1
    assert kinds.count("rejected") == len(step.tree) - len(step.tokens) + 1
    for (_, x1, y1, x2, y2), (_, x3, y3, x4, y4) in combinations(boxes, 2):
        assert x2 <= x3 or x4 <= x1 or y2 <= y3 or y4 <= y1
    assert len({box[2] for box in boxes if box[0] != "rejected"}) == 1
    size = picture.find("svg")
    assert all(box[3] <= float(size.get("width")) for box in boxes)
    assert all(box[4] <= float(size.get("height")) for box in boxes)


def test_tokens_are_shown_as_text_with_visible_spaces(tokenizer):
    tokens = tokenizer("< \n\t\x1b&").input_ids
    step = Step([tokens[0], tokens[-1]], DraftTree.chain(tokens[:-1]), [DraftTree.chain(tokens)])
    texts = [text.text for text in drawn(step, tokenizer).iter("text") if text.text]
    assert texts == ["x", "<", "100", "·", "100", "⏎", "100", "⇥", "100", "\ufffd", "100", "&"]


def test_a_step_says_what_was_verified(tokenizer, run):
    race = run("abcabcabc")
    numbers = range(1, len(race.steps) + 1)
    htmls = [step_html(i, race.steps, race.sources, tokenizer) for i in numbers]
    assert "the prompt is read" in htmls[0]
    verified = [int(n) for html in htmls for n in re.findall(r"(\d+) draft tokens? verified", html)]
    assert sum(verified) == sum(len(step.tree) for step in race.steps)
