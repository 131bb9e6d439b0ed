"""How likely a speculated step is right: as the paper estimates it, and by its lag."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.ralm.gamma import GROUPS, GammaByLag, PublishedGamma

LAGS = np.arange(1, 65)


@given(counts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_the_published_gamma_is_maximum_likelihood_over_the_window_with_a_cap(counts):
    gamma = PublishedGamma(most=0.6)
    for right, others in counts:
        gamma.record(range(1, right + others + 1), right)
    right = sum(right for right, _ in counts[-5:])
    wrong = sum(others > 0 for _, others in counts[-5:])  # of those after it nothing is known
    likelihood = right / (right + wrong) if right + wrong else 0.0
    assert gamma.of(LAGS) == pytest.approx(min(likelihood, 0.6))


def test_a_lag_counts_for_those_of_its_power_of_two():
    gamma = GammaByLag()
    before = gamma.of(LAGS)
    gamma.record([4], right=0)
    now = gamma.of(LAGS)
    assert (now[:3] == before[:3]).all() and (now[3:7] < before[3:7]).all()
    assert len(np.unique(now[3:7])) == len(np.unique(now[31:63])) == 1


@given(wrong=st.integers(1, 8), times=st.integers(1, 8))
def test_a_shorter_lag_is_no_worse_than_a_longer_one(wrong, times):
    gamma = GammaByLag()
    for _ in range(times):
        gamma.record([wrong], right=0)
        gamma.record([16, 17, 18], right=3)
    assert (np.diff(gamma.of(LAGS)) <= 0).all()


@given(
    counts=st.lists(
        st.tuples(st.lists(st.integers(1, 64), min_size=1, max_size=12), st.integers(0, 12)),
        max_size=30,
    )
)
def test_nothing_is_certain_and_nothing_is_lost(counts):
    gamma = GammaByLag()
    for lags, right in counts:
        gamma.record(lags, min(right, len(lags)))
    assert (gamma.of(LAGS) > 0).all() and (gamma.of(LAGS) < 1).all()
    gamma.begin_request()
    remembered = gamma._seen()
    assert remembered.shape == (GROUPS, 2) and (remembered >= 0).all()
    assert (remembered.sum(axis=1) <= 30 + 1e-9).all()


def test_what_has_long_been_right_can_soon_be_doubted():
    gamma = GammaByLag()
    for _ in range(2000):
        gamma.record(range(1, 33), right=32)
    sure = gamma.of(LAGS)
    assert 0.99 < sure[31] <= sure[0] <= 0.998
    for _ in range(5):
        gamma.record([32], right=0)
    assert gamma.of(LAGS)[31] < 0.9 < gamma.of(LAGS)[0]


def test_what_one_request_has_seen_the_next_believes_at_first():
    gamma = GammaByLag()
    for _ in range(30):
        gamma.record(range(1, 11), right=9)
    gamma.begin_request()
    assert (gamma.of(LAGS)[:7] > GammaByLag().of(LAGS)[:7]).all()
    # At a lag of 8 to 10 one in three was wrong. Of all steps only so many count.
    right, wrong = gamma._seen()[3]
    assert right / wrong == pytest.approx(2, rel=0.05)
    assert gamma._seen().sum(axis=1).max() == pytest.approx(30)
