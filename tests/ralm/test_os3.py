"""The stride scheduler against brute force, and its estimates of right steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.ralm.os3 import (
    LONGEST_STRIDE,
    Gamma,
    PublishedGamma,
    SearchSeconds,
    StrideScheduler,
    WaitingScheduler,
    expected_rates,
)

seconds = st.floats(1e-4, 10)
gammas = st.floats(0, 0.99)
STRIDES = np.arange(1, LONGEST_STRIDE + 1)


def verified(gamma: float, stride: int) -> float:
    """The expected number of verified steps, outcome by outcome. In the paper the first wrong step,
    which is made again with the truth, counts as verified."""
    outcomes = sum(gamma**wrong * (1 - gamma) * (wrong + 1) for wrong in range(stride))
    return outcomes + gamma**stride * stride


@given(gamma=gammas, a=seconds, b=seconds)
def test_the_synchronous_objective_is_verified_steps_over_time(gamma, a, b):
    rates = expected_rates(gamma, a, np.full(12, b), 0.0)
    for stride, rate in enumerate(rates, start=1):
        assert rate * (stride * a + b) == pytest.approx(verified(gamma, stride))


@given(stride=st.integers(1, 12), gamma=gammas, a=seconds, b=seconds)
def test_the_asynchronous_objective_is_that_of_the_paper(stride, gamma, a, b):
    right = gamma**stride
    published = (1 - right) / (
        (1 - gamma) * (right * ((stride - 1) * a + max(a, b)) + (1 - right) * (stride * a + b))
    )
    saved = gamma ** np.arange(1, stride + 1) * min(a, b)
    rates = expected_rates(gamma, a, np.full(stride, b), saved)
    assert rates[-1] == pytest.approx(published)


def taught(scheduler, a, b0, b1, right, wrong):
    """The scheduler after a verification of `right` right steps and `wrong` (0 or 1) wrong ones."""
    measured = scheduler.measured
    measured.begin_request()
    measured.record_step(100 * a, meanwhile=False, first=True)  # with the prompt
    measured.record_step(a, meanwhile=False)
    measured.record_search(1, b0 + b1, 0.0)
    measured.record_search(4, b0 + b1 * 4, 0.0)
    scheduler.gamma.record(right, bool(wrong))
    return scheduler


def ours(*knowledge, asynchronous=True):
    return taught(WaitingScheduler(asynchronous, exact=True), *knowledge)


@given(
    a=seconds,
    b0=seconds,
    b1=st.floats(0, 1),
    right=st.integers(0, 20),
    wrong=st.integers(0, 1),
    max_gamma=st.sampled_from([0.6, 0.9]),
    asynchronous=st.booleans(),
)
def test_no_stride_is_better_than_the_published_one(
    a, b0, b1, right, wrong, max_gamma, asynchronous
):
    scheduler = StrideScheduler(max_gamma, asynchronous)
    gamma = taught(scheduler, a, b0, b1, right, wrong).gamma.likely
    b = scheduler.measured.search(STRIDES)
    saved = gamma**STRIDES * np.minimum(a, b) * asynchronous
    rates = expected_rates(gamma, a, b, saved)
    assert rates[scheduler.stride(0) - 1] == pytest.approx(rates.max(), rel=1e-9)


@given(a=seconds, b0=seconds, b1=st.floats(0, 1), right=st.integers(0, 20))
def test_without_steps_beside_searches_ours_is_the_best_or_the_cautious_one(a, b0, b1, right):
    scheduler = ours(a, b0, b1, right, 1, asynchronous=False)
    # In each verification one step waits: the others are speculated, the first wrong one repeated.
    best, cautious = (
        [
            (verified(gamma, n - 1) + gamma ** (n - 1)) / (n * a + scheduler.measured.search(n))
            for n in STRIDES.tolist()
        ]
        for gamma in (scheduler.gamma.likely, scheduler.gamma.at_least)
    )
    chosen = scheduler.stride(0) - 1
    assert cautious[chosen] >= cautious[0] * (1 - 1e-9)
    if cautious[int(np.argmax(best))] > cautious[0] * (1 + 1e-9):
        assert best[chosen] == pytest.approx(max(best), rel=1e-9)


def test_ours_waits_where_a_wrong_step_costs_more_than_a_search():
    for asynchronous in (False, True):
        cheap = ours(1.0, 0.05, 0.0, 5, 1, asynchronous=asynchronous)
        assert cheap.stride(0) == 1 and not cheap.one_more_pays(1, 0, elapsed=0.0)
    as_long = ours(1.0, 1.0, 1.0, 0, 1)
    assert as_long.stride(0) == 1 and as_long.one_more_pays(1, 0, elapsed=0.0)
    dear = ours(1.0, 50.0, 0.0, 20, 0)
    assert dear.stride(0) > 10


def test_of_the_steps_that_were_speculated_only_those_that_pay_are_searched_for():
    free, dear = ours(1.0, 20.0, 0.0, 0, 1), ours(1.0, 0.0, 20.0, 0, 1)
    assert free.stride(6) >= 7 and dear.stride(6) == 1


@pytest.mark.parametrize(
    ("beside", "contention", "pays"),
    [(0.5, 1, True), (1, 1, True), (1.5, 1.5, True), (3, 3, False)],
)
def test_contention_is_not_paid_twice(beside, contention, pays):
    scheduler = ours(1.0, 1.0, 0.1, 100, 0)
    for _ in range(3):
        scheduler.measured.record_step(1.0, meanwhile=False)
        scheduler.measured.record_step(beside, meanwhile=True)
    assert scheduler.measured.contention == contention
    assert scheduler.one_more_pays(1, 0, elapsed=0.0) == pays


@pytest.mark.parametrize(("guess", "search", "pays"), [(0.3, 0.1, 0), (0.3, 0.4, 1), (0.009, 0, 1)])
def test_guesses_to_learn_from_take_no_longer_than_a_search_or_a_hundredth_of_a_step(
    guess, search, pays
):
    scheduler = ours(1.0, search, 0.0, 0, 1)
    scheduler.measured.guesses.append(guess)
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
    assert sure.one_more_pays(2, 2, elapsed=0.0)
    assert not sure.one_more_pays(2, 2, elapsed=9.99)
    unsure = ours(1.0, 1.2, 1.0, 0, 1)
    for _ in range(5):
        unsure.gamma.record(0, wrong=True)
    assert not unsure.one_more_pays(8, 11, elapsed=8.9)


@given(counts=st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=12))
def test_the_published_gamma_is_maximum_likelihood_over_the_window_with_a_cap(counts):
    gamma = PublishedGamma(limit=0.6)
    for right, wrong in counts:
        gamma.record(right, wrong)
    right, wrong = map(sum, zip(*counts[-5:], strict=True))
    likelihood = right / (right + wrong) if right + wrong else 0.0
    assert gamma.likely == pytest.approx(min(likelihood, 0.6))


def test_nothing_is_certain_and_what_has_long_been_right_can_soon_be_doubted():
    gamma = Gamma()
    for _ in range(2000):
        assert 0 <= gamma.at_least < gamma.likely < 1
        gamma.record(32, wrong=False)
    assert gamma.at_least > 0.99
    for _ in range(60):
        gamma.record(0, wrong=True)
    assert gamma.likely < 0.7
