"""The life cycle that every `Drafter` has."""

import numpy as np
import pytest
import torch

import hf_refspec as rs
from hf_refspec.drafting.calls import drafter_call
from hf_refspec.drafting.contract import Call, Drafter, Observation, checked_draft
from hf_refspec.drafting.tree import DraftTree
from tests.helpers.drafters import Fixed

PROMPT = np.array([1, 2, 3])


def recorder() -> Fixed:
    """Drafts 7 7 7, and the sibling 8 of the first."""
    return Fixed(DraftTree([7, 8, 7, 7], [-1, -1, 0, 2], [0.5, 0.4, 0.3, 0.2]).checked(10))


@pytest.mark.parametrize("fails_to_begin", [False, True])
def test_a_session_ends_after_an_exception_and_frees_the_drafter(fails_to_begin):
    drafter = Fixed()
    drafter.fails_to_begin = fails_to_begin
    with pytest.raises(ValueError, match="the id 9"), drafter_call(drafter, [PROMPT], 10):
        raise ValueError("the id 9")
    assert drafter.calls[-1] == ("end",)
    drafter.fails_to_begin = False
    with drafter_call(drafter, [PROMPT], 10):
        pass


def test_each_session_has_stats_of_its_own():
    drafter = recorder()
    with drafter_call(drafter, [PROMPT], 10):
        drafter.stats.record_rows([(4, 2)])
    assert drafter.stats.tokens == 3
    with drafter_call(drafter, [PROMPT], 10):
        assert drafter.stats.tokens == 0


def test_where_branches_cannot_be_verified_the_draft_is_the_best_path_of_the_tree():
    drafter = recorder()
    assert checked_draft(drafter, 4, Call(chain=True), 10).tokens.tolist() == [7, 7, 7]


class OfBefore(rs.Drafter):
    def draft(self, budget):
        return DraftTree.empty()


class LookUpOfBefore(rs.LookUp):
    longest_match = 1

    def look_up(self, context, budget, behind_path):
        return DraftTree.empty()


@pytest.mark.parametrize(
    "drafter", [OfBefore(), rs.ReferenceCopy() | OfBefore(), "auto" | LookUpOfBefore()]
)
def test_a_drafter_whose_methods_do_not_take_the_call_is_refused_before_any_pass(llama, drafter):
    with pytest.raises(TypeError, match=r"OfBefore.(draft|look_up)\(.*\) must be .* call\)"):
        llama.generate(torch.tensor([[5]]), candidate_generator=drafter)


def test_the_base_class_cannot_draft():
    with pytest.raises(NotImplementedError, match="Drafter must implement draft"):
        Drafter().draft(1, Call())


@pytest.mark.parametrize(
    "drafter",
    [
        rs.ReferenceCopy(references=[[5, 6, 7, 8]]),
        rs.ReferenceCopy() | rs.ReferenceCopy(references=[[5, 6, 7, 8]]),
    ],
    ids=["ReferenceCopy", "Blend"],
)
def test_forks_draft_independently(drafter):
    prompts = [np.array([1, 2, 3, 1]), np.array([9, 5]), np.array([4, 3, 4])]
    with drafter_call(drafter, prompts, vocab_size=50) as rows:
        assert rows[0] is drafter
        assert len(set(map(id, rows))) == 3
        drafts = [row.draft(2, Call()).tokens.tolist() for row in rows]
        assert drafts == [[2, 3], [6, 7], [3, 4]]
        rows[1].observe(Observation(np.array([40, 41, 40])))
        assert rows[1].draft(1, Call()).tokens.tolist() == [41]
        assert rows[0].draft(2, Call()).tokens.tolist() == [2, 3]
        with pytest.raises(RuntimeError, match="in use"), drafter_call(drafter, [prompts[0]], 50):
            pass
    with drafter_call(drafter, prompts[:1], vocab_size=50) as rows:
        assert rows[0].draft(2, Call()).tokens.tolist() == [2, 3]
