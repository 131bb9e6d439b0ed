"""Rows with one prompt draft from one another."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from calls import Call, padded_prompts

import hf_refspec as rs
from hf_refspec.drafting.calls import drafter_call

PROMPT, OTHER = np.array([1, 2, 3]), np.array([1, 2, 4])


def observed(drafter: rs.Drafter, *tokens: int) -> None:
    drafter.observe(rs.Observation(np.array(tokens)))


def drafted(drafter: rs.Drafter) -> list[int]:
    drafter.call.chain = True
    return drafter.draft(4).tokens.tolist()


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


@pytest.fixture(scope="module")
def sampled(llama):
    """Eight sampled rows, four of each of two prompts, plainly."""
    call = Call(llama, rows=2)
    inputs = {name: each.repeat_interleave(4, 0) for name, each in padded_prompts(2).items()}
    options = {**call.options, **inputs, "do_sample": True, "temperature": 0.3}
    torch.manual_seed(0)
    return llama, options, llama.generate(**options)


@pytest.mark.parametrize("given", [rs.SiblingCopy(), rs.ReferenceCopy() | rs.SiblingCopy(), "auto"])
def test_sampled_siblings_have_the_texts_of_plain_decoding(sampled, given):
    model, options, plain = sampled
    torch.manual_seed(0)
    output = model.generate(**options, candidate_generator=given, max_draft_tokens=8)
    assert output.tolist() == plain.tolist()


def test_siblings_make_drafts_longer(sampled):
    model, options, _ = sampled
    mats = []
    for drafter in (rs.ReferenceCopy(), rs.ReferenceCopy() | rs.SiblingCopy()):
        torch.manual_seed(0)
        model.generate(**options, candidate_generator=drafter, max_draft_tokens=8)
        mats.append(drafter.stats.mat)
    assert mats[1] > mats[0]
    stats = drafter.stats
    assert stats.sources[1].first > 0
    assert sum(source.first for source in stats.sources) == stats.accepted  # of all rows
