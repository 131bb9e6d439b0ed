"""What passes cost, estimated from noisy measurements."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.generation.pass_costs import PASS_TOKENS, TOKENS, PassCosts, pass_costs


def recorded(*passes: tuple[int, float]) -> PassCosts:
    """After passes over these tokens, in these seconds; those over one token were plain steps."""
    costs = PassCosts()
    for tokens, seconds in passes:
        costs.record(tokens, seconds, plain=tokens == 1)
    return costs


def seconds_of(costs: PassCosts, tokens: int, length: int = 0) -> float:
    return float(costs.seconds(np.array(tokens), length))


def ratios(costs: PassCosts) -> list[float]:
    dearest = costs.dearest(np.array(PASS_TOKENS))
    assert dearest[0] == 1
    return dearest.tolist()


@pytest.mark.parametrize("seconds", [1e-4, 0.05, 30.0])
def test_one_pass_predicts_all_by_their_expected_growth(seconds):
    growth = (0.0, 0.0, 0.5, 0.0, 0.0, 0.5)
    costs = PassCosts(growth)
    assert seconds_of(costs, 1) == seconds_of(costs, 4, 900) == 0  # nothing is known
    costs.record(1, seconds, plain=True)
    assert seconds_of(costs, 1) == pytest.approx(seconds, rel=0.01)
    # The less is known about a number, the cheaper it is assumed to be.
    doublings = np.log2(PASS_TOKENS)
    expected = np.exp(np.interp(doublings, range(7), np.cumsum((0.0, *growth))))
    taken = costs.seconds(np.array(PASS_TOKENS), 0)
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
    assert costs.passes == 40
    beyond = recorded((1, 1.0), *[(2000, 5.0)] * 9)
    assert seconds_of(beyond, TOKENS[-1]) == pytest.approx(5, rel=0.1)


def test_a_number_of_tokens_may_cost_more_than_larger_ones():
    """As products of matrices of three rows do where there are kernels for four."""
    costs = recorded(*[(1, 1.0), (3, 2.0), (4, 1.3), (8, 1.2)] * 20)
    measured = [seconds_of(costs, tokens) for tokens in (1, 3, 4, 8)]
    assert measured == pytest.approx([1.0, 2.0, 1.3, 1.2], rel=0.1)


passes_lists = st.lists(st.tuples(st.integers(1, 80), st.floats(1e-6, 1e3)), max_size=60)


@given(passes_lists)
def test_costs_stay_finite(passes):
    seconds = recorded(*passes).seconds(np.array(TOKENS), 0)
    assert np.isfinite(seconds).all() and (seconds >= 0).all()


@given(st.lists(st.tuples(st.integers(1, 70), st.floats(1e-3, 10.0)), max_size=40))
def test_a_pass_is_filled_up_to_a_number_that_is_known_to_take_less_time(passes):
    costs = recorded((1, 1.0), *passes)
    sizes = [max(size for size in TOKENS if size <= tokens) for tokens, _ in passes]
    for tokens in range(1, 80):
        filled = costs.cheapest(tokens)
        assert filled >= tokens
        if filled > tokens:
            assert sizes.count(filled) >= 3


def test_three_tokens_are_filled_up_to_eight_where_eight_take_less_time_and_one_is_not():
    costs = recorded(*[(1, 0.06), (3, 0.12), (5, 0.08), (8, 0.072), (16, 0.09)] * 10)
    assert [costs.cheapest(tokens) for tokens in (1, 2, 3, 4, 5, 8, 12, 99)] == [
        *(1, 8, 8, 8, 8, 8, 12, 99)
    ]


@pytest.mark.parametrize("tokens", [1, 9])
def test_a_pass_that_was_disturbed_changes_next_to_nothing(tokens):
    quiet = [(1, 1.0), (9, 2.0)] * 5
    before, after = recorded(*quiet), recorded(*quiet, (tokens, 40.0))
    assert ratios(after) == pytest.approx(ratios(before), rel=0.05)
    assert not after.wants_plain_step(0)


@pytest.mark.parametrize("stalled", [0, 1, 2])
def test_a_stall_in_the_first_three_passes_is_forgotten_after_ten(stalled):
    passes = [(1, 1.0), (1, 1.0), (1, 1.0), *[(1, 1.0), (4, 1.5), (9, 2.0)] * 3]
    disturbed = passes.copy()
    disturbed[stalled] = 1, 10.0
    before, after = recorded(*passes[:10]), recorded(*disturbed[:10])
    assert ratios(after) == ratios(before)
    assert seconds_of(after, 9) == seconds_of(before, 9)
    assert not after.wants_plain_step(0)


@pytest.mark.parametrize("times", [3, 10, 30])
def test_the_first_pass_of_a_size_which_sets_something_up_does_not_make_it_dear(times):
    set_up = recorded(*[(1, 0.05)] * 6, (2, 0.05 * times))
    assert ratios(set_up)[1] < 1.5
    dear = recorded(*[(1, 0.05)] * 6, *[(2, 0.05 * times)] * 2)
    assert ratios(dear)[1] == pytest.approx(times)


def test_when_the_machine_becomes_slower_plain_steps_are_measured_again_and_all_numbers_follow():
    costs = recorded(*[(1, 1.0), (8, 2.0)] * 10)
    before = ratios(costs)
    steps = []
    for _ in range(60):
        plain = costs.wants_plain_step(0)
        costs.record(1 if plain else 8, 2.0 if plain else 4.0, plain=plain)
        steps.append(plain)
    assert 2 <= sum(steps) <= 6 and not any(steps[20:])
    assert seconds_of(costs, 1) == pytest.approx(2.0, rel=0.1)
    assert ratios(costs) == pytest.approx(before, rel=0.1)


def test_a_size_that_was_dear_is_tried_again_after_very_many_passes():
    costs = recorded(*[(1, 1.0)] * 3, *[(32, 8.0)] * 2)
    assert seconds_of(costs, 32) == pytest.approx(8.0)
    for _ in range(2000):
        costs.record(1, 1.0, plain=True)
    assert seconds_of(costs, 32) < 4.0


def test_a_size_that_is_not_known_may_be_dear_and_one_that_is_not():
    costs = recorded(*[(1, 1.0)] * 9)
    sizes = np.array([1, 2, 8, 64])
    unknown = costs.dearest(sizes)
    assert unknown[0] == 1 and (np.diff(unknown) > 0.3).all() and unknown[3] > 4.5
    for _ in range(9):
        costs.record(8, 1.5)
    assert costs.dearest(sizes)[2] == pytest.approx(1.5, rel=0.1)


def test_a_plain_step_costs_the_median_of_those_at_texts_of_a_similar_length():
    costs = PassCosts()
    assert costs.wants_plain_step(100)
    for length, seconds in ((100, 1.0), (1500, 2.0)):
        for disturbed in (1.0, 9.0, 1.0):
            costs.record(1, disturbed * seconds, length, plain=True)
        assert not costs.wants_plain_step(length)
    assert (seconds_of(costs, 1, 900), seconds_of(costs, 1, 2000)) == (1.0, 2.0)
    assert costs.wants_plain_step(5000)


def test_another_length_moves_all_costs_at_once():
    costs = recorded(*[(1, 1.0), (8, 2.0)] * 20)
    before = ratios(costs)
    assert costs.wants_plain_step(9000)
    for _ in range(3):
        costs.record(1, 10.0, 9000, plain=True)
    assert seconds_of(costs, 8, 9000) == pytest.approx(20, rel=0.1)
    assert seconds_of(costs, 8) == pytest.approx(2, rel=0.1)
    assert ratios(costs) == pytest.approx(before, rel=0.1)


def test_the_plain_steps_of_several_rows_tell_what_those_of_fewer_cost():
    costs = PassCosts()
    for _ in range(3):
        costs.record(4, 2.0, plain=True)
    assert seconds_of(costs, 4) == pytest.approx(2.0, rel=0.1)
    assert 1.0 < seconds_of(costs, 1) < 2.0 < seconds_of(costs, 8)


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
