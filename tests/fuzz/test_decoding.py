"""Calls with drafts end as plain ones do, and the fuzzer notices if they do not."""

from __future__ import annotations

from collections import Counter

import pytest

from hf_refspec.generation.row import Row

from .decoding import Case
from .outcomes import DIFFERENT, EQUAL

COUNT, CHUNKS = 120, 3


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_what_a_caller_sees_is_what_plain_decoding_shows(chunk):
    cases = [Case(number) for number in range(chunk, COUNT, CHUNKS)]
    outcomes = [case.run() for case in cases]
    bad = [(c.number, o) for c, o in zip(cases, outcomes, strict=True) if o.is_bad]
    assert [f"{number}: {outcome.name}: {outcome.detail}" for number, outcome in bad] == []
    # What is always refused, or never accepted, would test nothing.
    assert Counter(outcome.name for outcome in outcomes)[EQUAL] > len(cases) / 4
    assert sum(case.accepted for case in cases) > len(cases) / 4


def test_a_case_is_always_the_same():
    first, again = ([Case(number) for number in (3, 14)] for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert one.run() == other.run()
        assert (one.name, one.done, one.accepted) == (other.name, other.done, other.accepted)


def test_a_row_that_draws_twice_is_found(monkeypatch):
    choose = Row.choose

    def choose_twice(row, logits):
        choose(row, logits)
        return choose(row, logits)

    monkeypatch.setattr(Row, "choose", choose_twice)
    assert DIFFERENT in {Case(number).run().name for number in range(20)}
