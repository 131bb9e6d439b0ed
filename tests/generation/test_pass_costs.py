"""What a pass costs, as far as measured, and how measurements are believed."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_refspec.generation.pass_costs import PASS_TOKENS, PassCosts, pass_costs


def recorded(*passes: tuple[int, float]) -> PassCosts:
    costs = PassCosts()
    for tokens, seconds in passes:
        costs.record(tokens, seconds)
    return costs


def seconds_of(costs: PassCosts, tokens: int) -> float:
    return float(costs.seconds()[PASS_TOKENS.index(tokens)])


def test_the_first_pass_over_a_number_of_tokens_is_not_counted():
    costs = recorded((1, 99.0), (1, 2.0), (5, 99.0))
    assert seconds_of(costs, 1) == seconds_of(costs, 5) == pytest.approx(2.0, rel=0.05)
    assert costs.passes == [2, 0, 0, 1, 0, 0, 0, 0]


def test_what_lies_between_two_measured_numbers_costs_what_the_smaller_one_does():
    costs = recorded((1, 1.0), (1, 1.0), (65, 3.0), (65, 3.0))
    assert costs.seconds().tolist() == pytest.approx([1] * 7 + [3], rel=0.05)
    assert recorded((1, 1.0), (1, 1.0)).seconds().tolist() == [1] * 8


@pytest.mark.parametrize("power", [0.0, 0.3, 1.0])
def test_past_the_largest_measured_number_costs_grow_on_as_a_power(power):
    costs = recorded(*[(tokens, tokens**power) for tokens in (1, 5, 1, 5)])
    past = [tokens**power for tokens in PASS_TOKENS if tokens >= 5]
    assert costs.seconds()[3:].tolist() == pytest.approx(past, rel=0.1)
    assert PassCosts().seconds().tolist() == [0] * len(PASS_TOKENS)


def test_a_number_between_two_counts_as_the_smaller_one():
    """Otherwise drafts of such a length would never be known to be dear."""
    costs = recorded((1, 1.0), (1, 1.0), (11, 3.0), (11, 3.0))
    assert [seconds_of(costs, tokens) for tokens in (5, 9)] == pytest.approx([1, 3], rel=0.05)
    assert costs.passes == [2, 0, 0, 0, 2, 0, 0, 0]
    assert seconds_of(recorded((100, 5.0), (100, 5.0)), PASS_TOKENS[-1]) == 5


passes_lists = st.lists(st.tuples(st.integers(1, 80), st.floats(1e-6, 1e3)), max_size=60)


@settings(deadline=None)
@given(passes_lists)
def test_a_longer_pass_is_never_cheaper(passes):
    seconds = recorded(*passes).seconds()
    assert np.isfinite(seconds).all() and (seconds >= 0).all()
    assert (np.diff(seconds) >= 0).all()


@settings(deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), max_size=20))
def test_no_single_pass_changes_a_known_cost_by_much(others):
    costs = recorded((1, 1.0), (1, 1.0))
    for seconds in others:
        before = seconds_of(costs, 1)
        costs.record(1, seconds)
        assert 0.5 * before < seconds_of(costs, 1) < 1.5 * before


@pytest.mark.parametrize("now", [0.2, 5.0])
def test_a_machine_that_becomes_faster_or_slower_is_found_out(now):
    costs = recorded(*[(1, 1.0)] * 5, *[(1, now)] * 60)
    assert seconds_of(costs, 1) == pytest.approx(now, rel=0.01)


def test_what_was_slow_is_tried_again_the_sooner_the_less_it_was_measured():
    def passes_until_half(measured: int) -> int:
        costs = recorded(*[(1, 1.0)] * 3, *[(33, 4.0)] * measured)
        for passes in range(10**4):
            if seconds_of(costs, 33) < 2:
                return passes
            costs.record(1, 1.0)
        raise AssertionError("never tried again")

    assert seconds_of(recorded(*[(33, 4.0)] * 2), 33) == 4
    waits = [passes_until_half(measured) for measured in (2, 5, 20, 50)]
    assert 10 < waits[0] < waits[1] < waits[2] == waits[3]


def test_a_cost_that_has_decayed_is_what_the_next_pass_says_it_is():
    """Both first passes were disturbed: one that is not is enough to find that out."""
    passes = [*[(1, 1.0)] * 3, *[(33, 4.0)] * 2, *[(1, 1.0)] * 200]
    assert seconds_of(recorded(*passes, (33, 1.25)), 33) == 1.25
    costs = recorded(*passes, (33, 4.0))
    assert seconds_of(costs, 33) == 4
    for _ in range(100):  # measured three times now, it decays more slowly
        assert seconds_of(costs, 33) >= 2
        costs.record(1, 1.0)


def test_the_next_number_tried_is_not_far_past_what_is_known():
    costs, tried = PassCosts(), []
    while costs.passes[-1] == 0:
        tried.append(costs.most_tokens)
        costs.record(costs.most_tokens, 1.0)
    plain = [tokens for tokens in tried if tokens == 1]
    longer = tried[len(plain) :]
    assert len(plain) > 2 and tried == plain + longer
    assert longer == sorted(longer)
    assert longer[-1] == PASS_TOKENS[-1] > longer[0]
    # Twice each, so that it is known before the next.
    assert longer[:-1:2] == longer[1::2] and len(set(longer)) == len(longer[::2])


def test_costs_are_kept_for_each_model_dtype_device_and_verifier():
    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    costs = pass_costs(model, "tree")
    assert pass_costs(model, "tree") is costs
    known = [costs, pass_costs(other, "tree"), pass_costs(model, "chain")]
    known.append(pass_costs(model, "tree", rows=2))
    known.append(pass_costs(model.to(torch.bfloat16), "tree"))
    known.append(pass_costs(model.to("meta"), "tree"))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        known.append(pass_costs(other, "tree"))
    finally:
        torch.set_num_threads(threads)
    assert len(set(map(id, known))) == len(known)


def test_costs_are_freed_with_their_model():
    model = torch.nn.Linear(1, 1)
    costs = weakref.ref(pass_costs(model, "tree"))
    gc.collect()
    assert costs() is not None
    del model
    gc.collect()
    assert costs() is None
