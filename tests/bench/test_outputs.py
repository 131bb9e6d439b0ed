"""Outputs are compared, and ties are no differences."""

from __future__ import annotations

import pytest

from hf_refspec.bench.outputs import ROUNDING, Output, tied


@pytest.mark.parametrize(
    ("one", "other", "places"),
    [([1, 2, 3], [1, 2, 3], []), ([1, 5, 3], [1, 2, 4], [1, 2]), ([1], [1, 2, 3], [1, 2])],
)
def test_differences_are_the_places_with_other_tokens_or_with_none(one, other, places):
    assert Output(one).differences(Output(other)) == places
    assert Output(other).differences(Output(one)) == places


def test_two_logits_are_tied_if_they_are_equal_but_for_rounding():
    assert tied(7.0, 7.0 * (1 + ROUNDING / 2)) and tied(-7.0, -7.0)
    assert not tied(7.0, 7.0 * (1 + 2 * ROUNDING)) and not tied(7.0, -7.0)


def test_a_tie_explains_a_difference_where_a_text_was_forced():
    plain = Output([1, 2, 3], [5.0, 6.0, 7.0])
    assert Output([1, 9, 8], [5.0, 6.000001, 7.1]).beyond_rounding(plain) == [2]
    assert Output([1, 9, 8]).beyond_rounding(Output([1, 2, 3])) == [1, 2]
    assert Output([1, 9], [5.0, 6.0]).beyond_rounding(plain) == [1, 2]
