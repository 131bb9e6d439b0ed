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
    WaitingScheduler,
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


def taught(scheduler, a, b0, b1, right, wrong):
    """The scheduler after a verification of `right` right steps and `wrong` (0 or 1) wrong ones."""
    scheduler.begin_request()
    scheduler.record_step(100 * a, beside=False, first=True)  # with the prompt
    scheduler.record_step(a, beside=False)
    scheduler.record_search(1, b0 + b1, 0.0)
    scheduler.record_search(4, b0 + b1 * 4, 0.0)
    scheduler.gamma.record(range(1, right + wrong + 1), right)
    scheduler.record_overhead(0.0)
    return scheduler


def ours(*knowledge, asynchronous=True):
    return taught(WaitingScheduler(asynchronous, exact=True), *knowledge)


@settings(deadline=None)
@given(
    a=seconds,
    b0=seconds,
    b1=st.floats(0, 1),
    right=st.integers(0, 20),
    wrong=st.integers(0, 1),
    max_gamma=st.sampled_from([0.6, 0.9]),
    steps_ahead=st.sampled_from([0, 1]),
)
def test_no_stride_is_better_than_the_published_one(
    a, b0, b1, right, wrong, max_gamma, steps_ahead
):
    gamma = PublishedGamma(max_gamma)
    scheduler = taught(StrideScheduler(gamma, steps_ahead), a, b0, b1, right, wrong)
    strides = np.arange(1, LONGEST_STRIDE + 1)
    b = scheduler.search_seconds(strides)
    saved = np.cumprod(gamma.of(strides)) * np.minimum(a, b) if steps_ahead else 0.0
    rates = expected_rates(gamma.of(strides), a, b, saved)
    assert rates[scheduler.stride([]) - 1] == pytest.approx(rates.max(), rel=1e-9)


@settings(deadline=None)
@given(a=seconds, b0=seconds, b1=st.floats(0, 1), right=st.integers(0, 20))
def test_without_steps_beside_searches_ours_is_the_best_or_the_cautious_one(a, b0, b1, right):
    scheduler = ours(a, b0, b1, right, 1, asynchronous=False)
    # In each verification one step waits: the others are speculated, the first wrong one repeated.
    rates = {}
    for gamma in (scheduler.gamma.of, scheduler.gamma.at_least):
        rates[gamma] = []
        for stride in range(1, LONGEST_STRIDE + 1):
            guessed = gamma(LAGS)[: stride - 1]
            verified = sum(chance * n for chance, n in outcomes(guessed)) + np.prod(guessed)
            rates[gamma].append(verified / (stride * a + float(scheduler.search_seconds(stride))))
    chosen = scheduler.stride([]) - 1
    best, cautious = rates.values()
    assert cautious[chosen] >= cautious[0] * (1 - 1e-9)
    if cautious[int(np.argmax(best))] > cautious[0] * (1 + 1e-9):
        assert best[chosen] == pytest.approx(max(best), rel=1e-9)


def test_ours_waits_where_a_wrong_step_costs_more_than_a_search():
    for asynchronous in (False, True):
        cheap = ours(1.0, 0.05, 0.0, 5, 1, asynchronous=asynchronous)
        assert cheap.stride([]) == 1 and not cheap.one_more_pays(1, [], elapsed=0.0)
    as_long = ours(1.0, 1.0, 1.0, 0, 1)
    assert as_long.stride([]) == 1 and as_long.one_more_pays(1, [], elapsed=0.0)
    dear = ours(1.0, 50.0, 0.0, 20, 0)
    assert dear.stride([]) > 10


def test_of_the_steps_that_were_speculated_only_those_that_pay_are_searched_for():
    free, dear = ours(1.0, 20.0, 0.0, 0, 1), ours(1.0, 0.0, 20.0, 0, 1)
    assert free.stride(range(2, 8)) >= 7 and dear.stride(range(2, 8)) == 1


def test_contention_and_guesses_are_not_paid_twice():
    def scheduler(seconds_beside):
        scheduler = ours(1.0, 1.0, 0.1, 100, 0)
        for _ in range(3):
            scheduler.record_step(1.0, beside=False)
            scheduler.record_step(seconds_beside, beside=True)
        return scheduler

    assert [scheduler(each).contention for each in (0.5, 1.0, 1.5, 3.0)] == [1.0, 1.0, 1.5, 2.0]
    assert scheduler(1.0).one_more_pays(1, [], elapsed=0.0)
    assert not scheduler(2.0).one_more_pays(1, [], elapsed=0.0)


def test_guesses_to_learn_from_take_no_longer_than_a_search_or_a_hundredth_of_a_step():
    for guess_seconds, search_seconds, pays in (
        (0.3, 0.1, False),
        (0.3, 0.4, True),
        (0.009, 0, True),
    ):
        scheduler = ours(1.0, search_seconds, 0.0, 0, 1)
        scheduler.record_guess(guess_seconds)
        assert scheduler.learning_pays == pays


@given(b0=seconds, b1=st.floats(0, 1), batches=st.lists(st.integers(1, 16), min_size=5))
def test_the_cost_of_a_search_is_fitted_whatever_one_of_them_took(b0, b1, batches):
    cost = SearchSeconds()
    cost.record(1, 1000.0)
    for batch in [1, 2, 4, 8, *batches, 1, 2, 4, 8]:
        cost.record(batch, b0 + b1 * batch)
    assert cost(8) == pytest.approx(b0 + 8 * b1, rel=0.05)


def test_going_on_pays_while_there_is_time_left_and_speculation_is_right():
    sure = ours(1.0, 10.0, 0.0, 20, 0)
    assert sure.one_more_pays(2, [1, 2], elapsed=0.0)
    assert not sure.one_more_pays(2, [1, 2], elapsed=9.99)
    unsure = ours(1.0, 1.2, 1.0, 0, 1)
    for _ in range(5):
        unsure.gamma.record([1], right=0)
    assert not unsure.one_more_pays(8, range(1, 12), elapsed=8.9)


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
