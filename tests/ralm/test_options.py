"""The letters and numbers of a `Speculation`."""

from __future__ import annotations

import pytest

from hf_refspec.ralm.options import Speculation


def test_the_letters_mean_what_they_mean_in_the_paper():
    plain = Speculation.parse("")
    assert (plain.prefetch, plain.stride, plain.asynchronous) == (1, 3, False)
    full = Speculation.published("sap")
    assert (full.prefetch, full.stride, full.asynchronous) == (20, "os3", True)
    assert full.max_gamma == 0.6
    assert Speculation.parse("psa") == Speculation()
    assert Speculation.parse(None) is None
    assert Speculation.parse(full) is full


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Speculation.parse("pqs"), ValueError),
        (lambda: Speculation.parse("pp"), ValueError),
        (lambda: Speculation.parse(True), TypeError),
        (lambda: Speculation(prefetch=0), ValueError),
        (lambda: Speculation(prefetch="auto"), TypeError),
        (lambda: Speculation(stride=0), ValueError),
        (lambda: Speculation(stride=2.5), TypeError),
        (lambda: Speculation(asynchronous="yes"), TypeError),
        (lambda: Speculation(max_gamma=1.0), ValueError),
    ],
)
def test_bad_options_are_refused(make, error):
    with pytest.raises(error):
        make()
