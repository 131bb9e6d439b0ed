"""The stride scheduler, against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.ralm.stride import (
    LONGEST_STRIDE,
    PRIOR,
    Gamma,
    SearchSeconds,
    StrideScheduler,
    expected_rate,
)

seconds = st.floats(1e-4, 10)
gammas = st.floats(0, 0.99)


def outcomes(stride: int, gamma: float):
    """Chance and verified steps of everything that a verification can find."""
    for right in range(stride):
        yield gamma**right * (1 - gamma), right + 1  # the wrong one is done again with the truth
    yield gamma**stride, stride


@given(stride=st.integers(1, 12), gamma=gammas, a=seconds, b=seconds)
def test_the_synchronous_objective_is_verified_steps_over_time(stride, gamma, a, b):
    verified = sum(chance * steps for chance, steps in outcomes(stride, gamma))
    expected = expected_rate(stride, gamma, a, b) * (stride * a + b)
    # A wrong step counts as verified in the paper, unless it is the one after all right ones.
    assert expected == pytest.approx(verified)


@given(stride=st.integers(1, 12), gamma=gammas, a=seconds, b=seconds)
def test_the_asynchronous_objective_is_that_of_the_paper(stride, gamma, a, b):
    right = gamma**stride
    published = (1 - right) / (
        (1 - gamma) * (right * ((stride - 1) * a + max(a, b)) + (1 - right) * (stride * a + b))
    )
    assert expected_rate(stride, gamma, a, b, min(a, b)) == pytest.approx(published)


def scheduler_that_knows(a, b0, b1, right, wrong, max_gamma=None, steps_ahead=0):
    scheduler = StrideScheduler(window=5, max_gamma=max_gamma, steps_ahead=steps_ahead)
    scheduler.record_step(a)
    for batch in (1, 4):
        scheduler.record_search(batch, b0 + b1 * batch)
    scheduler.record_verification(right, wrong)
    scheduler.record_overhead(0.0)
    return scheduler


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
    scheduler = scheduler_that_knows(a, b0, b1, right, wrong, max_gamma, steps_ahead)
    rates = {}
    longest = LONGEST_STRIDE if max_gamma else min(LONGEST_STRIDE, right + 1)
    for stride in range(1, longest + 1):
        b = scheduler.search_seconds(stride)
        saved = min(a, b) if steps_ahead else 0.0
        rates[stride] = expected_rate(stride, scheduler.gamma, a, b, saved)
    assert rates[scheduler.stride()] == pytest.approx(max(rates.values()), rel=1e-9)


def test_the_first_stride_is_1():
    assert StrideScheduler(window=5, max_gamma=None, steps_ahead=0).stride() == 1


def test_slow_searches_and_right_steps_make_strides_long():
    assert scheduler_that_knows(1.0, 100.0, 0.0, right=20, wrong=0).stride() > 15
    assert scheduler_that_knows(1.0, 0.01, 0.0, right=1, wrong=1).stride() == 1
    assert scheduler_that_knows(1.0, 100.0, 0.0, 20, 0, max_gamma=0.6).stride() < 10


def test_searches_that_slow_down_the_steps_beside_them_make_strides_long():
    def scheduler(seconds_beside):
        scheduler = scheduler_that_knows(1.0, 1.0, 0.1, right=100, wrong=0, steps_ahead=None)
        for _ in range(3):
            scheduler.record_step(1.0)
            scheduler.record_step(seconds_beside, beside_search=True)
        return scheduler

    assert [scheduler(each).contention for each in (0.5, 1.0, 1.5, 3.0)] == [1.0, 1.0, 1.5, 2.0]
    assert scheduler(1.0).stride() < 4 <= scheduler(1.5).stride() < scheduler(2.0).stride()


def test_strides_grow_no_faster_than_what_was_verified():
    assert scheduler_that_knows(1.0, 100.0, 0.0, right=3, wrong=0).stride() == 4
    assert scheduler_that_knows(1.0, 100.0, 0.0, right=0, wrong=1).stride() == 1
    assert scheduler_that_knows(1.0, 100.0, 0.0, right=0, wrong=0, max_gamma=0.6).stride() == 1


@given(counts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), min_size=1, max_size=12))
def test_the_published_gamma_is_maximum_likelihood_over_the_window_with_a_cap(counts):
    gamma = Gamma(window=5, most=0.6)
    for right, wrong in counts:
        gamma.record(right, wrong)
    right, wrong = np.sum(counts[-5:], axis=0)
    likelihood = right / (right + wrong) if right + wrong else 0.0
    assert gamma.value == pytest.approx(min(likelihood, 0.6))


def test_our_gamma_has_no_cap_and_is_surer_the_more_it_has_seen():
    gamma, values = Gamma(window=5, most=None), []
    for _ in range(20):
        gamma.record(8, 0)
        values.append(gamma.value)
    assert values == sorted(values)
    assert 0.98 < values[-1] < 1
    for _ in range(5):
        gamma.record(0, 1)
    assert gamma.value < 0.95


@given(b0=seconds, b1=st.floats(0, 1), batches=st.lists(st.integers(1, 16), min_size=5))
def test_the_cost_of_a_search_is_fitted_whatever_one_of_them_took(b0, b1, batches):
    cost = SearchSeconds()
    cost.record(1, 1000.0)
    for batch in [1, 2, 4, 8, *batches, 1, 2, 4, 8]:
        cost.record(batch, b0 + b1 * batch)
    assert cost(8) == pytest.approx(b0 + 8 * b1, rel=0.05)


def test_going_on_pays_while_there_is_time_left_and_speculation_is_right():
    sure = scheduler_that_knows(1.0, 10.0, 0.0, right=20, wrong=0, steps_ahead=None)
    assert sure.pays_to_go_on(batch=2, ahead=0, elapsed=0.0)
    assert not sure.pays_to_go_on(batch=2, ahead=0, elapsed=9.99)
    unsure = scheduler_that_knows(1.0, 1.2, 1.0, right=0, wrong=1, steps_ahead=None)
    for _ in range(5):
        unsure.record_verification(0, 1)
    assert not unsure.pays_to_go_on(batch=8, ahead=3, elapsed=8.9)


def test_nothing_is_certain_however_long_nothing_was_wrong():
    scheduler = scheduler_that_knows(1.0, 100.0, 0.0, right=20, wrong=0)
    for _ in range(2000):
        scheduler.record_verification(20, 0)
    assert scheduler.gamma == 0.995 and scheduler.stride() > 15
    another = StrideScheduler(5, None, 0, prior=scheduler.remembered())
    assert 0.98 < another.gamma <= 0.995


def test_what_one_request_has_seen_is_the_prior_of_another():
    first = Gamma(window=5, most=None)
    assert first.remembered() == PRIOR
    for _ in range(30):
        first.record(9, 1)
    right, wrong = first.remembered()
    assert right + wrong == pytest.approx(20) and right / wrong == pytest.approx(9, rel=0.1)
    assert Gamma(5, None, (right, wrong)).value > Gamma(5, None).value - 0.05
    for _ in range(5):
        first.record(0, 1)
    assert first.remembered()[0] < right
