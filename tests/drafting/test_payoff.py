"""When a pass of an assistant pays."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_refspec.drafting.payoff import Payoff, Prices

ONE = Prices(1.0)  # a second for each token
NONE = np.empty(0, dtype=np.float32)


def payoff(prices: Prices = ONE, pass_seconds: float = 0.5) -> Payoff:
    """Of an assistant whose passes take so long."""
    made = Payoff()
    made.prices = prices
    made.record_pass(1, pass_seconds, of_prompt=False)
    made._draft_seconds = 0.0
    return made


def target(token_seconds: float, *pass_seconds: float, others: int = 0) -> Prices:
    """Of a target whose passes over 1, 2, ... tokens take so long."""
    return Prices(token_seconds, tuple(range(1, 1 + len(pass_seconds))), pass_seconds, others)


FREE = target(1.0, *[1.0] * 64)  # nodes cost nothing


@pytest.mark.parametrize(
    ("prices", "chance", "pays"),
    [
        (FREE, 1.0, True),
        (FREE, 0.5, False),  # half a chance of 0.8 tokens
        (target(0.5, *[1.0] * 64), 1.0, False),
        (target(1.0, *np.arange(1.0, 64.0)), 1.0, False),
        (target(0.0, *[1.0] * 64), 1.0, False),
        (target(1.0, 1.0), 1.0, False),  # there is no room for a node
        (target(1.0, *[1.0] * 64, others=63), 1.0, False),
        (Prices(), 0.01, True),
        (Prices(), 0.0, False),
    ],
    ids=str,
)
def test_a_pass_pays_if_it_saves_more_than_it_takes(prices, chance, pays):
    assert payoff(prices).pays(NONE, chance) == pays


def test_several_passes_may_pay_where_one_does_not():
    """A second node costs as much as a token saves, and those after it nothing."""
    dear_second = target(1.0, 1.0, *[1.9] * 63)
    assert payoff(dear_second, 0.05).pays(NONE, 1.0)
    assert not payoff(dear_second, 0.5).pays(NONE, 1.0)
    assert not payoff(target(1.0, 1.0, 1.9), 0.05).pays(NONE, 1.0)


def test_nodes_of_others_that_are_verified_anyway_make_it_cheaper():
    dear_second = target(1.0, 1.0, *[1.7] * 63)
    known = np.array([0.9], dtype=np.float32)
    assert payoff(dear_second, 0.5).pays(known, 0.9)
    assert not payoff(dear_second, 0.5).pays(known * 0, 0.9)


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 1, width=32), max_size=8),
    st.lists(st.floats(0.125, 2), min_size=1, max_size=12),
    st.integers(0, 3),
)
def test_the_value_is_that_of_the_best_number_of_nodes(probs, seconds, others):
    prices = target(0.5, *seconds, others=others)
    values = []
    for count in range(1 + len(probs)):
        if count == 0 or count + others < len(seconds):
            taken = seconds[min(count + others, len(seconds) - 1)]
            values.append(0.5 * sum(sorted(probs)[::-1][:count]) - taken)
    count, value = prices.best(np.array(probs, dtype=np.float32))
    assert value == pytest.approx(max(values)) == pytest.approx(values[count])


def outcomes(made: Payoff, count: int, asked: int, accepted: int, emitted: int = 1) -> None:
    for _ in range(count):
        made.record_outcome(asked, accepted, accepted, emitted, NONE, nodes=0)


def test_what_was_accepted_decides_how_much_it_saves():
    made = payoff(FREE)
    outcomes(made, 5, asked=1, accepted=0)
    assert not made.pays(NONE, 1.0)
    outcomes(made, 10, asked=2, accepted=2, emitted=3)
    assert made.pays(NONE, 1.0)


def test_an_assistant_that_was_wrong_is_tried_again_after_a_while():
    made = payoff(FREE)
    outcomes(made, 20, asked=1, accepted=0)
    passes = 0
    while not made.pays(NONE, 1.0):
        outcomes(made, 1, asked=0, accepted=0)
        passes += 1
    assert 20 < passes < 400


def test_it_runs_only_while_it_has_saved_as_much_as_it_took():
    made = payoff(FREE)
    made.record_pass(100, 3.0, of_prompt=True)
    assert made.pays(NONE, 1.0)  # the prompt counts at the end
    made.end_text()
    assert not made.pays(NONE, 1.0)
    outcomes(made, 1, asked=3, accepted=3, emitted=4)
    assert made.pays(NONE, 1.0)


def test_what_the_target_takes_longer_over_its_nodes_is_not_saved():
    made = payoff(target(1.0, *(0.9 * np.arange(1.0, 64.0))))
    known = np.array([1.0, 1.0, 1.0, 0.5, 0.5], dtype=np.float32)  # three of them pay
    made.record_outcome(asked=2, accepted=2, best=2, emitted=3, probs=known, nodes=8)
    assert made._balance == pytest.approx(2 + 0.02 * 3 - 0.9 * 5)


def test_it_may_take_two_percent_of_the_time_to_find_out():
    made = payoff(FREE)
    made.record_pass(50, 1.0, of_prompt=False)
    assert made.pays(NONE, 1.0)  # the draft goes on
    outcomes(made, 49, asked=0, accepted=0)
    assert not made.pays(NONE, 1.0)
    outcomes(made, 2, asked=0, accepted=0)
    assert made.pays(NONE, 1.0)


def test_calls_that_name_their_drafts_leave_the_balance():
    made = payoff(Prices(math.inf))
    made.record_pass(100, 3.0, of_prompt=False)
    outcomes(made, 1, asked=5, accepted=5, emitted=6)
    assert made._balance == 0.0


@pytest.mark.parametrize(("accepted", "passes"), [(0, 1), (1, 50)])
def test_with_a_number_of_nodes_a_draft_is_as_deep_as_its_tokens_are_accepted(accepted, passes):
    made = payoff(Prices())
    assert made.pays(NONE, 1.0, 5) and not made.pays(NONE, 1.0, 6)  # nothing is known
    outcomes(made, 200, asked=1, accepted=accepted)
    assert [made.pays(NONE, 1.0, each) for each in (0, passes)] == [True, accepted == 1]
