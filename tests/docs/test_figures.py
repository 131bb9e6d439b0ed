"""The figures of a draft tree and its mask."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

import hf_refspec as rs

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
TREE = rs.DraftTree([70, 71, 60, 63], [-1, -1, 0, 2], [0.6, 0.3, 0.5, 0.4]).checked(300)


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(FIGURES / "draft_tree.py"))


def shapes(picture: str, kind: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(picture).findall(f"{{http://www.w3.org/2000/svg}}{kind}")


def test_a_tree_has_a_box_for_each_node_and_a_line_to_each_parent(script, tokenizer):
    picture = script["draw_tree"](tokenizer, 65, TREE, {0, 2}, 67)
    assert len(shapes(picture, "rect")) == 1 + (1 + len(TREE))  # the ground, the root
    assert len(shapes(picture, "path")) == len(TREE)
    accepted = [each for each in shapes(picture, "rect") if each.get("fill") == script["ACCEPTED"]]
    assert len(accepted) == 3


def test_a_mask_shows_what_each_node_sees(script, tokenizer):
    picture = script["draw_mask"](tokenizer, 65, TREE, {0, 2})
    seen = [each for each in shapes(picture, "rect") if each.get("fill") == script["ACCEPTED"]]
    assert len(seen) == 1 + 2 + 3  # the root, and the accepted path
