"""Of each step it is known what was verified, what was accepted, and who drafted it."""

from __future__ import annotations

import numpy as np

from hf_refspec.apps.space.steps import Step
from hf_refspec.drafting.tree import DraftTree


def tree(tokens, parents) -> DraftTree:
    probs = np.linspace(0.9, 0.1, len(tokens), dtype=np.float32)
    return DraftTree(np.array(tokens), np.array(parents, dtype=np.int32), probs)


def test_the_accepted_path_and_the_source_of_each_node():
    first, second = DraftTree.chain([5, 6]), tree([5, 7, 8], [-1, 0, -1])
    step = Step([5, 7, 9], tree([5, 6, 7, 8], [-1, 0, 0, -1]), [first, second])
    assert step.accepted() == [0, 2]
    assert step.sources() == [0, 0, 1, 1]
    empty = Step([5], DraftTree.empty(), [])
    assert empty.accepted() == [] and empty.sources() == []


def test_the_steps_of_a_race_agree_with_the_owners_of_its_tokens(run):
    race = run("abcabcabc")
    owners = [owner for _, owner in race.drafted.pieces[: len(race.drafted.ids)]]
    of_steps = []
    for step in race.steps:
        sources = step.sources()
        of_steps += [*(sources[node] for node in step.accepted()), None]
    assert of_steps == owners
    assert any(len(step.tree) for step in race.steps)  # how many is for the clock to say
