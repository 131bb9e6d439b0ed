"""Where two lists of ids differ, and how fast calls were together."""

from __future__ import annotations

import pytest

from hf_refspec.apps.shared.comparison import Decoded, first_difference, rate, speedup, verdict


@pytest.mark.parametrize(
    ("plain", "other", "position"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [1], 0), ([], [], None)],
)
def test_the_first_difference_is_an_id_or_an_end(plain, other, position):
    assert first_difference(plain, other) == position
    expected = "ids identical" if position is None else f"IDS DIFFER from position {position}"
    assert verdict(plain, other) == expected


def test_rates_are_of_all_calls_together():
    plain, drafted = [Decoded([1] * 10, 1), Decoded([1] * 30, 3)], [Decoded([1] * 40, 2)]
    assert (rate(plain), rate(drafted), speedup(plain, drafted)) == (10, 20, 2)
