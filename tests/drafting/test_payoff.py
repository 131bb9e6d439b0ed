"""When a pass of an assistant pays."""

from __future__ import annotations

import math

import pytest

from hf_refspec.drafting.payoff import Payoff, Prices

ONE = Prices(1.0)  # a second for each token


def payoff(prices: Prices = ONE, pass_seconds: float = 0.5) -> Payoff:
    """Of an assistant whose passes take so long."""
    made = Payoff()
    made.prices = prices
    made.record_pass(1, pass_seconds, of_prompt=False)
    made._balance = 0.0
    return made


@pytest.mark.parametrize(
    ("prices", "chance", "pays"),
    [
        (ONE, 1.0, True),
        (ONE, 0.5, False),  # half a chance of 0.8 tokens
        (Prices(0.5), 1.0, False),
        (Prices(1.0, node_seconds=0.4), 1.0, False),
        (Prices(0.0), 1.0, False),
        (Prices(), 0.01, True),
        (Prices(), 0.0, False),
    ],
    ids=str,
)
def test_a_pass_pays_if_it_saves_more_than_it_takes(prices, chance, pays):
    assert payoff(prices).pays(chance, unread=1) == pays


def test_what_was_accepted_decides_how_much_it_saves():
    made = payoff()
    for _ in range(5):
        made.record_outcome(accepted=0, asked=1, emitted=1)
    assert not made.pays(1.0, unread=1)
    for _ in range(10):
        made.record_outcome(accepted=2, asked=2, emitted=3)
    assert made.pays(1.0, unread=1)


def test_an_assistant_that_was_wrong_is_tried_again_after_a_while():
    made = payoff()
    for _ in range(20):
        made.record_outcome(accepted=0, asked=1, emitted=1)
    passes = 0
    while not made.pays(1.0, unread=1):
        made.record_outcome(accepted=0, asked=0, emitted=1)
        passes += 1
    assert 20 < passes < 400


def test_it_reads_what_it_missed_only_while_it_has_saved_as_much_as_it_took():
    made = payoff()
    made.record_pass(100, 3.0, of_prompt=True)
    assert made.pays(1.0, unread=50)  # the prompt counts at the end
    made.end_text()
    assert made.pays(1.0, unread=4) and not made.pays(1.0, unread=50)
    made.record_outcome(accepted=3, asked=3, emitted=4)
    assert made.pays(1.0, unread=50)


def test_it_may_take_two_percent_of_the_time_to_find_out():
    made = payoff()
    made.record_pass(50, 1.0, of_prompt=False)
    for _ in range(49):
        made.record_outcome(accepted=0, asked=0, emitted=1)
    assert not made.pays(1.0, unread=50)
    for _ in range(2):
        made.record_outcome(accepted=0, asked=0, emitted=1)
    assert made.pays(1.0, unread=50)


def test_calls_that_name_their_drafts_leave_the_balance():
    made = payoff(Prices(math.inf))
    made.record_pass(100, 3.0, of_prompt=False)
    made.record_outcome(accepted=5, asked=5, emitted=6)
    assert made._balance == 0.0
