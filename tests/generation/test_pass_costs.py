"""What passes cost, estimated from noisy measurements."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_refspec.generation.pass_costs import PASS_TOKENS, TOKENS, PassCosts, pass_costs


def recorded(*passes: tuple[int, float]) -> PassCosts:
    costs = PassCosts()
    for tokens, seconds in passes:
        costs.record(tokens, seconds)
    return costs


def seconds_of(costs: PassCosts, tokens: int) -> float:
    return float(costs.seconds(np.array(tokens)))


def ratios(costs: PassCosts) -> list[float]:
    seconds = costs.seconds(np.array(PASS_TOKENS))
    return (seconds / seconds[0]).tolist()


@pytest.mark.parametrize("seconds", [1e-4, 0.05, 30.0])
def test_one_pass_predicts_all_by_their_expected_growth(seconds):
    growth = (0.0, 0.0, 0.5, 0.0, 0.0, 0.5)
    costs = PassCosts(growth)
    assert costs.plain_seconds(1, 0) == costs.plain_seconds(4, 900) == 0  # nothing is known
    costs.record(1, seconds)
    assert costs.plain_seconds(1, 0) == pytest.approx(seconds, rel=0.01)
    # The less is known about a number, the cheaper it is assumed to be.
    doublings = np.log2(PASS_TOKENS)
    expected = np.exp(np.interp(doublings, range(7), np.cumsum((0.0, *growth))))
    taken = costs.seconds(np.array(PASS_TOKENS))
    assert (taken <= 1.01 * seconds * expected).all()
    assert (taken >= 0.7 * seconds * expected).all()


def test_a_measurement_informs_its_neighbours_and_the_nearer_ones_more():
    before = ratios(recorded((1, 1.0), (1, 1.0)))
    after = ratios(recorded((1, 1.0), (1, 1.0), *[(5, 3.0)] * 4))
    changes = np.array(after) / before
    assert changes[0] == 1 and (np.diff(changes[:4]) > 0).all()
    assert (changes[3:] > 1.5).all()  # all the longer ones are as much dearer


def test_a_number_between_two_informs_both():
    costs = recorded(*[(1, 1.0), (18, 3.0)] * 20)
    assert seconds_of(costs, 16) <= 3.1 and seconds_of(costs, 24) >= 2.9
    counts = dict(zip(TOKENS, costs.passes, strict=True))
    assert counts[1] == counts[16] == 20 and sum(costs.passes) == 40
    assert seconds_of(recorded(*[(2000, 5.0)] * 9), TOKENS[-1]) == pytest.approx(5, rel=0.1)


def test_a_number_of_tokens_may_cost_more_than_larger_ones():
    """As products of matrices of three rows do where there are kernels for four."""
    costs = recorded(*[(1, 1.0), (3, 2.0), (4, 1.3), (8, 1.2)] * 20)
    measured = [seconds_of(costs, tokens) for tokens in (1, 3, 4, 8)]
    assert measured == pytest.approx([1.0, 2.0, 1.3, 1.2], rel=0.1)


passes_lists = st.lists(st.tuples(st.integers(1, 80), st.floats(1e-6, 1e3)), max_size=60)


@settings(deadline=None)
@given(passes_lists)
def test_costs_stay_finite(passes):
    seconds = recorded(*passes).seconds(np.array(TOKENS))
    assert np.isfinite(seconds).all() and (seconds >= 0).all()


@given(st.lists(st.tuples(st.integers(1, 70), st.floats(1e-3, 10.0)), max_size=40))
def test_a_pass_is_filled_up_to_a_number_that_is_known_to_take_less_time(passes):
    costs = recorded(*passes)
    for tokens in range(1, 80):
        filled = costs.cheapest(tokens)
        assert filled >= tokens
        if filled > tokens:
            assert costs.passes[TOKENS.index(filled)] >= 3


def test_three_tokens_are_filled_up_to_eight_where_eight_take_less_time_and_one_is_not():
    costs = recorded(*[(1, 0.06), (3, 0.12), (5, 0.08), (8, 0.072), (16, 0.09)] * 10)
    assert [costs.cheapest(tokens) for tokens in (1, 2, 3, 4, 5, 7, 8, 12, 99)] == [
        *(1, 8, 8, 8, 8, 8, 8, 12, 99)
    ]


@pytest.mark.parametrize("tokens", [1, 9])
def test_a_pass_that_was_disturbed_changes_next_to_nothing(tokens):
    quiet = [(1, 1.0), (9, 2.0)] * 5
    before, after = recorded(*quiet), recorded(*quiet, (tokens, 40.0))
    assert ratios(after) == pytest.approx(ratios(before), rel=0.05)


@pytest.mark.parametrize("times", [3, 10, 30])
def test_a_first_pass_that_sets_something_up_does_not_make_drafts_look_dear_for_good(times):
    set_up = recorded((2, 0.05 * times), *[(1, 0.05)] * 6)
    assert set_up.plain_seconds(1, 0) == pytest.approx(0.05, rel=0.1)
    assert ratios(set_up)[1] < 1.5  # a node that is accepted most often pays, and sets it right


def test_when_the_machine_becomes_slower_all_numbers_do():
    costs = recorded(*[(1, 1.0), (8, 2.0)] * 10)
    before = ratios(costs)
    for _ in range(60):
        costs.record(8, 4.0)
    assert costs.plain_seconds(1, 0) == pytest.approx(2.0, rel=0.1)
    assert ratios(costs) == pytest.approx(before, rel=0.1)


def test_an_old_slow_measurement_is_believed_less_and_less():
    costs = recorded(*[(1, 1.0)] * 3, *[(32, 8.0)] * 2)
    believed = [seconds_of(costs, 32)]
    for _ in range(3):
        for _ in range(2000):
            costs.record(1, 1.0)
        believed.append(seconds_of(costs, 32))
    assert believed == sorted(believed, reverse=True) and believed[-1] < 0.98 * believed[0]


def test_a_size_that_is_not_known_may_be_dear_and_one_that_is_not():
    costs = recorded(*[(1, 1.0)] * 9)
    sizes = np.array([1, 2, 8, 64])
    unknown = costs.dearest(sizes)
    assert unknown[0] == 1 and (np.diff(unknown) > 0.3).all() and unknown[3] > 4.5
    for _ in range(9):
        costs.record(8, 1.5)
    assert costs.dearest(sizes)[2] == pytest.approx(1.6, rel=0.1)


def test_a_plain_step_costs_the_median_of_those_at_texts_of_a_similar_length():
    costs = PassCosts()
    assert costs.wants_plain_step(1, 100)
    for length, seconds in ((100, 1.0), (1500, 2.0)):
        for disturbed in (1.0, 1.0, 1.0, 9.0, 1.0):
            costs.record(1, disturbed * seconds, length)
            costs.record_plain_step(1, length, disturbed * seconds)
        assert not costs.wants_plain_step(1, length)
    assert (costs.plain_seconds(1, 900), costs.plain_seconds(1, 2000)) == (1.0, 2.0)
    assert costs.wants_plain_step(1, 5000) and not costs.wants_plain_step(3, 1500)
    for _ in range(9):
        costs.record(8, 3.0, 1500)
    assert not costs.wants_plain_step(1, 1500)
    while not costs.wants_plain_step(1, 1500):  # the machine is slower now
        costs.record(8, 9.0, 1500)
    for _ in range(3):
        costs.record(1, 6.0, 1500)
        costs.record_plain_step(1, 1500, 6.0)
    assert costs.plain_seconds(1, 1500) == 6.0


def test_another_length_moves_all_costs_at_once():
    costs = recorded(*[(1, 1.0), (8, 2.0)] * 20)
    before = ratios(costs)
    for _ in range(2):
        costs.record(8, 20.0, length=9000)
    assert seconds_of(costs, 1) == pytest.approx(10, rel=0.1)
    assert ratios(costs) == pytest.approx(before, rel=0.1)


def test_a_gpu_and_16_bits_are_expected_to_make_long_passes_cheap():
    model = torch.nn.Linear(1, 1)
    single = ratios(pass_costs(model, "tree"))[-1]
    half = ratios(pass_costs(model.to(torch.bfloat16), "tree"))[-1]
    other = ratios(pass_costs(model.to("meta"), "tree"))[-1]  # as any device but a CPU
    assert other < half < single


def test_costs_are_kept_for_each_model_dtype_device_and_verifier():
    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    costs = pass_costs(model, "tree")
    assert pass_costs(model, "tree") is costs
    known = [costs, pass_costs(other, "tree"), pass_costs(model, "chain")]
    known.append(pass_costs(model.to(torch.bfloat16), "tree"))
    known.append(pass_costs(model.to("meta"), "tree"))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        known.append(pass_costs(other, "tree"))
    finally:
        torch.set_num_threads(threads)
    assert len(set(map(id, known))) == len(known)
