"""The life cycle that every `Drafter` has."""

import pytest
import torch

import hf_refspec as rs
from hf_refspec.drafting.contract import Call, Drafter, checked_draft
from hf_refspec.drafting.tree import DraftTree
from tests.helpers.drafters import Fixed


def test_where_branches_cannot_be_verified_the_draft_is_the_best_path_of_the_tree():
    drafter = Fixed(DraftTree([7, 8, 7, 7], [-1, -1, 0, 2], [0.5, 0.4, 0.3, 0.2]).checked(10))
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
