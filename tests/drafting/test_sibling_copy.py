"""Rows with one prompt draft from one another."""

import copy
import pickle

import numpy as np
import pytest

import hf_refspec as rs
from hf_refspec.drafting import contract
from hf_refspec.drafting.calls import drafter_call
from tests.helpers.calls import Call, padded_prompts

PROMPT, OTHER = np.array([1, 2, 3]), np.array([1, 2, 4])


def observed(drafter: rs.Drafter, *tokens: int) -> None:
    drafter.observe(rs.Observation(np.array(tokens)))


def drafted(drafter: rs.Drafter) -> list[int]:
    return drafter.draft(4, contract.Call(chain=True)).tokens.tolist()


@pytest.fixture
def rows():
    """Two rows with one prompt, and one with another."""
    with drafter_call(rs.SiblingCopy(), [PROMPT, PROMPT, OTHER], 100) as rows:
        yield rows


def test_a_row_drafts_what_its_sibling_has_said_after_the_same_tokens(rows):
    assert drafted(rows[1]) == []
    observed(rows[0], 10, 11, 12, 13)
    assert drafted(rows[1]) == [10, 11, 12, 13]  # behind the prompt
    observed(rows[1], 20, 11)
    assert drafted(rows[1]) == [12, 13]
    observed(rows[0], 14)
    assert drafted(rows[1]) == [12, 13, 14]


def test_rows_of_other_prompts_draft_nothing(rows):
    observed(rows[0], 10, 11, 12)
    observed(rows[2], 10)
    assert drafted(rows[2]) == []


def test_a_row_that_has_ended_is_drafted_from_as_long_as_another_goes_on(rows):
    observed(rows[0], 10, 11, 12)
    rows[0].end()
    observed(rows[1], 10)
    assert drafted(rows[1]) == [11, 12]


def test_nothing_is_left_after_a_call():
    drafter = rs.SiblingCopy()
    with drafter_call(drafter, [PROMPT, PROMPT], 100) as rows:
        observed(rows[1], 10, 11)
    assert not drafter._groups.texts
    with drafter_call(drafter, [PROMPT, PROMPT], 100) as rows:
        observed(rows[0], 10)
        assert drafted(rows[0]) == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_has_groups_of_its_own(copied):
    drafter = rs.SiblingCopy()
    idle = drafter.fork()
    with drafter_call(drafter, [PROMPT], 100):
        observed(drafter, 10, 11)
        other = copied(idle)
        with drafter_call(other, [PROMPT, PROMPT], 100) as rows:
            assert drafted(rows[0]) == []


def test_sampled_siblings_have_the_texts_of_plain_decoding_and_longer_drafts(llama):
    """Eight rows, four of each of two prompts."""
    inputs = {name: each.repeat_interleave(4, 0) for name, each in padded_prompts(2).items()}
    call = Call(llama, inputs=inputs, do_sample=True, temperature=0.3)
    alone = call.assert_lossless(rs.ReferenceCopy())
    both = call.assert_lossless(rs.ReferenceCopy() | rs.SiblingCopy())
    for drafter in (rs.SiblingCopy(), "auto"):
        call.assert_lossless(drafter)
    assert both.mat > alone.mat
    assert both.sources[1].first > 0
    assert sum(source.first for source in both.sources) == both.accepted  # of all rows
