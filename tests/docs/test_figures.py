"""The figures of a draft tree and its mask."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

import hf_refspec as rs

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
TREE = rs.DraftTree([70, 71, 60, 63], [-1, -1, 0, 2], [0.6, 0.3, 0.5, 0.4]).checked(300)


def test_a_tree_has_a_box_for_each_node_and_a_mask_shows_what_each_sees(tokenizer):
    script = runpy.run_path(str(FIGURES / "draft_tree.py"))

    def shapes(picture: str, kind: str) -> list[str | None]:
        found = ElementTree.fromstring(picture).findall(f"{{http://www.w3.org/2000/svg}}{kind}")
        return [each.get("fill") for each in found]

    picture = script["draw_tree"](tokenizer, 65, TREE, {0, 2}, 67)
    assert len(shapes(picture, "rect")) == 1 + (1 + len(TREE))  # the ground, the root
    assert len(shapes(picture, "path")) == len(TREE)  # to each parent
    assert shapes(picture, "rect").count(script["ACCEPTED"]) == 3
    picture = script["draw_mask"](tokenizer, 65, TREE, {0, 2})
    assert shapes(picture, "rect").count(script["ACCEPTED"]) == 1 + 2 + 3  # the root, the path
