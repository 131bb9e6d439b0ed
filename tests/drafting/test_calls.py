"""The drafters of a call, from `begin` to `end`."""

import numpy as np
import pytest

import hf_refspec as rs
from hf_refspec.drafting.calls import drafter_call
from hf_refspec.drafting.contract import Call, Observation
from tests.helpers.drafters import Fixed

PROMPT = np.array([1, 2, 3])


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
    drafter = Fixed()
    with drafter_call(drafter, [PROMPT], 10):
        drafter.stats.record_rows([(4, 2)])
    assert drafter.stats.tokens == 3
    with drafter_call(drafter, [PROMPT], 10):
        assert drafter.stats.tokens == 0


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
