"""The stride scheduler against brute force, and its estimates of right steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_refspec.ralm.os3 import (
    LONGEST_STRIDE,
    GammaByLag,
    PublishedGamma,
    SearchSeconds,
    StrideScheduler,
    expected_rates,
)

seconds = st.floats(1e-4, 10)
gammas = st.floats(0, 0.99)
LAGS = np.arange(1, 65)
rights = st.lists(gammas, min_size=1, max_size=12).map(np.array)


def outcomes(right: np.ndarray):
    """The chance and the number of verified steps of each outcome of a verification."""
    for wrong, gamma in enumerate(right):
        yield np.prod(right[:wrong]) * (1 - gamma), wrong + 1  # made again with the truth
    yield np.prod(right), len(right)


@given(right=rights, a=seconds, b=seconds)
def test_the_synchronous_objective_is_verified_steps_over_time(right, a, b):
    rates = expected_rates(right, a, np.full(len(right), b))
    for stride, rate in enumerate(rates, start=1):
        verified = sum(chance * steps for chance, steps in outcomes(right[:stride]))
        # In the paper the first wrong step counts as verified.
        assert rate * (stride * a + b) == pytest.approx(verified)


@given(stride=st.integers(1, 12), gamma=gammas, a=seconds, b=seconds)
def test_the_asynchronous_objective_is_that_of_the_paper(stride, gamma, a, b):
    right = gamma**stride
    published = (1 - right) / (
        (1 - gamma) * (right * ((stride - 1) * a + max(a, b)) + (1 - right) * (stride * a + b))
    )
    saved = gamma ** np.arange(1, stride + 1) * min(a, b)
    rates = expected_rates(np.full(stride, gamma), a, np.full(stride, b), saved)
    assert rates[-1] == pytest.approx(published)


def scheduler_that_knows(a, b0, b1, right, wrong, max_gamma=None, steps_ahead=0):
    """A scheduler after a verification of `right` right steps and `wrong` (0 or 1) wrong ones."""
    gamma = GammaByLag() if max_gamma is None else PublishedGamma(max_gamma)
    scheduler = StrideScheduler(gamma, steps_ahead)
    scheduler.record_step(a)
    scheduler.search_seconds.record(1, b0 + b1)
    scheduler.search_seconds.record(4, b0 + b1 * 4)
    gamma.record(range(1, right + wrong + 1), right)
    scheduler.record_overhead(0.0)
    return scheduler, gamma


@settings(deadline=None)
@given(
    a=seconds,
    b0=seconds,
    b1=st.floats(0, 1),
    right=st.integers(0, 20),
    wrong=st.integers(0, 1),
    max_gamma=st.sampled_from([None, 0.6, 0.9]),
    steps_ahead=st.sampled_from([0, 1]),
)
def test_no_stride_is_better_than_the_scheduled_one(
    a, b0, b1, right, wrong, max_gamma, steps_ahead
):
    scheduler, gamma = scheduler_that_knows(a, b0, b1, right, wrong, max_gamma, steps_ahead)
    strides = np.arange(1, LONGEST_STRIDE + 1)
    b = scheduler.search_seconds(strides)
    saved = np.cumprod(gamma.of(strides)) * np.minimum(a, b) if steps_ahead else 0.0
    rates = expected_rates(gamma.of(strides), a, b, saved)
    assert rates[scheduler.stride() - 1] == pytest.approx(rates.max(), rel=1e-9)


@settings(deadline=None)
@given(a=seconds, b0=seconds, b1=st.floats(0, 1), right=st.integers(0, 20))
def test_beside_faster_searches_strides_are_the_best_in_the_long_run(a, b0, b1, right):
    scheduler, gamma = scheduler_that_knows(a, b0, b1, right, 1, steps_ahead=None)
    rates, slower = {}, set()
    for each in range(1, LONGEST_STRIDE + 1):
        of_steps = gamma.of(np.arange(1, each + 1))
        b = float(scheduler.search_seconds(each))
        if b > each * a:
            slower.add(each)
        # Beside the search run the steps that there is time for, the last one in part.
        whole, part = divmod(min(b / a, each), 1)
        ahead = np.append(np.cumprod(gamma.of(each + np.arange(1, each + 1))), 0)
        saved = a * (ahead[: int(whole)].sum() + part * ahead[int(whole)])
        verified = sum(chance * steps for chance, steps in outcomes(of_steps))
        rates[each] = verified / (each * a + b - np.prod(of_steps) * saved)
    stride, best = scheduler.stride(), max(rates.values())
    at_its_best = {each for each, rate in rates.items() if rate == pytest.approx(best, rel=1e-9)}
    assert stride in at_its_best or (stride == 1 and at_its_best & slower)


def test_where_searches_take_the_time_the_next_one_begins_at_once():
    scheduler, _ = scheduler_that_knows(1.0, 1.0, 2.0, right=20, wrong=0, steps_ahead=None)
    assert [scheduler.stride(made) for made in (0, 1, 5)] == [1, 1, 5]
    # But not if queries are so dear that few steps pay beside them.
    dear, _ = scheduler_that_knows(1.0, 50.0, 5.0, right=20, wrong=0, steps_ahead=None)
    assert dear.stride() > 10


def test_all_that_is_made_is_verified():
    assert StrideScheduler(GammaByLag(), steps_ahead=0).stride() == 1
    scheduler, _ = scheduler_that_knows(1.0, 3.0, 0.1, right=20, wrong=0, steps_ahead=None)
    assert 1 < scheduler.stride(0) == scheduler.stride(1) < scheduler.stride(20) == 20


def test_searches_that_slow_down_the_steps_beside_them_make_strides_long():
    def scheduler(seconds_beside):
        scheduler, _ = scheduler_that_knows(1.0, 1.0, 0.1, right=100, wrong=0, steps_ahead=None)
        for _ in range(3):
            scheduler.record_step(1.0)
            scheduler.record_step(seconds_beside, beside_search=True)
        return scheduler

    assert [scheduler(each).contention for each in (0.5, 1.0, 1.5, 3.0)] == [1.0, 1.0, 1.5, 2.0]
    assert scheduler(1.0).stride() < scheduler(1.5).stride() < scheduler(2.0).stride()


@given(b0=seconds, b1=st.floats(0, 1), batches=st.lists(st.integers(1, 16), min_size=5))
def test_the_cost_of_a_search_is_fitted_whatever_one_of_them_took(b0, b1, batches):
    cost = SearchSeconds()
    cost.record(1, 1000.0)
    for batch in [1, 2, 4, 8, *batches, 1, 2, 4, 8]:
        cost.record(batch, b0 + b1 * batch)
    assert cost(8) == pytest.approx(b0 + 8 * b1, rel=0.05)


def test_going_on_pays_while_there_is_time_left_and_speculation_is_right():
    sure, _ = scheduler_that_knows(1.0, 10.0, 0.0, right=20, wrong=0, steps_ahead=None)
    assert sure.one_more_pays([1, 2], [], elapsed=0.0)
    assert not sure.one_more_pays([1, 2], [], elapsed=9.99)
    unsure, gamma = scheduler_that_knows(1.0, 1.2, 1.0, right=0, wrong=1, steps_ahead=None)
    for _ in range(5):
        gamma.record([1], right=0)
    assert not unsure.one_more_pays(range(1, 9), [9, 10, 11], elapsed=8.9)


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


@given(
    counts=st.lists(
        st.tuples(st.lists(st.integers(1, 64), min_size=1, max_size=12), st.integers(0, 12)),
        max_size=30,
    )
)
def test_nothing_is_certain_and_a_shorter_lag_is_no_worse_than_a_longer_one(counts):
    gamma = GammaByLag()
    for lags, right in counts:
        gamma.record(lags, min(right, len(lags)))
    estimates = gamma.of(LAGS)
    assert (estimates > 0).all() and (estimates < 1).all() and (np.diff(estimates) <= 0).all()


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
    # One in three steps at a lag of 8 to 10 was wrong.
    assert 0.6 < gamma.of(LAGS)[8] < 0.7
    # Only 30 of 120 right steps at a lag of 4 to 7 count, so that a few wrong ones weigh soon.
    for _ in range(5):
        gamma.record([5], right=0)
    assert gamma.of(LAGS)[4] < 0.9
