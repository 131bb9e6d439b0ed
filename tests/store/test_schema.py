"""An annotation is a check, at any depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from hf_refspec.store.schema import AtMost, Range, parse, values_of


@dataclass(frozen=True)
class Leaf:
    size: Annotated[int, Range(1, 9)]


@dataclass(frozen=True)
class Tree:
    kind: Literal["oak", "elm"]
    leaves: Annotated[list[Leaf], AtMost(2)]
    numbers: list[Annotated[int, Range(0, 3)]]
    crown: Leaf | None
    about: dict[str, object]


GOOD = {
    "kind": "elm",
    "leaves": [{"size": 2}, {"size": 9}],
    "numbers": [0, 3],
    "crown": {"size": 4},
    "about": {"any": ["thing"]},
}


def test_what_is_declared_is_made():
    tree = parse(Tree, GOOD)
    assert tree == Tree("elm", [Leaf(2), Leaf(9)], [0, 3], Leaf(4), {"any": ["thing"]})
    assert list(values_of(Leaf, tree)) == [Leaf(2), Leaf(9), Leaf(4)]
    assert parse(Tree, GOOD | {"crown": None}).crown is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "ash"}, "kind is 'ash'"),
        ({"kind": 1}, "kind is 1"),
        ({"leaves": {}}, "leaves is {}"),
        ({"leaves": [{"size": 1}] * 3}, "leaves has 3 entries, more than 2"),
        ({"leaves": [{"size": 10}]}, "size is 10"),
        ({"leaves": [{"size": True}]}, "size is True"),
        ({"leaves": [{"size": 1, "hue": 2}]}, "'hue' is not a name that belongs there"),
        ({"leaves": [7]}, "7 should be an object that names size"),
        ({"numbers": [1, 4]}, r"numbers\[1\] is 4"),
        ({"crown": 3}, "3 should be an object"),
        ({"about": []}, r"about is \[\]"),
        ({"more": 1}, "'more' is not a name that belongs there"),
    ],
)
def test_all_else_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        parse(Tree, GOOD | change)


def test_a_missing_name_is_told():
    with pytest.raises(KeyError, match="crown"):
        parse(Tree, {name: value for name, value in GOOD.items() if name != "crown"})
