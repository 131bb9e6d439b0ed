"""The letters and numbers of a `RalmSpeculation`."""

import pytest

from hf_refspec.ralm.options import RalmSpeculation


def test_the_letters_mean_what_they_mean_in_the_paper():
    plain = RalmSpeculation.parse("")
    assert (plain.prefetch, plain.stride, plain.asynchronous) == (1, 3, False)
    full = RalmSpeculation.published("sap")
    assert (full.prefetch, full.stride, full.asynchronous) == (20, "os3", True)
    assert full.max_gamma == 0.6
    assert (full.prefetch_searches, plain.prefetch_searches) == ("first", "all")
    assert RalmSpeculation.parse("psa") == RalmSpeculation()
    assert RalmSpeculation.parse(None) is None
    assert RalmSpeculation.parse(full) is full


@pytest.mark.parametrize("letters", ["pqs", "pp"])
def test_other_letters_are_refused(letters):
    with pytest.raises(ValueError, match="speculation must be of the letters"):
        RalmSpeculation.parse(letters)
