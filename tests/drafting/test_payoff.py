"""When a pass of an assistant pays."""

import numpy as np
import pytest

from hf_refspec.drafting.contract import Speed
from hf_refspec.drafting.payoff import Payoff, outcome
from hf_refspec.drafting.tree import DraftTree

NONE = np.empty(0, dtype=np.float32)


def target(*pass_seconds: float) -> Speed:
    """The speed with a target whose passes over 1, 2, ... tokens take these seconds."""

    def speed(probs: np.ndarray, drafting_seconds: float) -> float:
        sums = np.cumsum([1.0, *sorted(probs, reverse=True)])[: len(pass_seconds)]
        return float((sums / (np.array(pass_seconds[: len(sums)]) + drafting_seconds)).max())

    return speed


FREE = target(*[1.0] * 64)  # nodes cost nothing


def payoff(pass_seconds: float = 0.5) -> Payoff:
    """That of an assistant whose passes take this long."""
    made = Payoff()
    made.record_pass(1, pass_seconds, of_prompt=False)
    made._draft_seconds = 0.0
    return made


DEAR_SECOND, DEARER_SECOND = (target(1.0, *[seconds] * 63) for seconds in (1.7, 1.9))
KNOWN, UNKNOWN = np.float32([0.9]), np.float32([0.0])


@pytest.mark.parametrize(
    ("pass_seconds", "speed", "known", "chances", "pays"),
    [
        (0.5, FREE, NONE, 1.0, True),
        (0.5, FREE, NONE, 0.5, False),  # half a chance of 0.8 tokens
        (0.5, target(*[0.5] * 64), NONE, 1.0, False),
        (0.5, target(*np.arange(1.0, 64.0)), NONE, 1.0, False),
        (0.5, target(1.0), NONE, 1.0, False),  # there is no room for a node
        (0.5, None, NONE, 0.01, True),
        (0.5, None, NONE, 0.0, False),
        # Several passes may pay where one does not: a node after the second costs nothing.
        (0.05, DEARER_SECOND, NONE, 1.0, True),
        (0.5, DEARER_SECOND, NONE, 1.0, False),
        (0.05, target(1.0, 1.9), NONE, 1.0, False),
        # Nodes of others that are verified anyway make it cheaper.
        (0.5, DEAR_SECOND, KNOWN, 0.9, True),
        (0.5, DEAR_SECOND, UNKNOWN, 0.9, False),
        # A pass that drafts several tokens pays where one token would not.
        (0.9, FREE, NONE, np.ones(1), False),
        (0.9, FREE, NONE, np.ones(3), True),
        (0.9, FREE, NONE, np.array([1.0, 0.1, 0.0]), False),
    ],
)
def test_a_pass_pays_if_it_saves_more_than_it_takes(pass_seconds, speed, known, chances, pays):
    depth = {"depth": np.size(chances)} if np.ndim(chances) else {}
    assert payoff(pass_seconds).pays(speed, known, chances, **depth) == pays


def outcomes(made: Payoff, count: int, asked: int, accepted: int, emitted: int = 1) -> None:
    for _ in range(count):
        made.record_outcome(FREE, asked, accepted, accepted, emitted)


def test_an_assistant_that_was_wrong_is_tried_again_after_a_while():
    made = payoff()
    outcomes(made, 20, asked=1, accepted=0)
    passes = 0
    while not made.pays(FREE, NONE, 1.0):
        outcomes(made, 1, asked=0, accepted=0)
        passes += 1
    assert 20 < passes < 400


def test_it_runs_only_while_it_has_saved_as_much_as_it_took():
    made = payoff()
    made.record_pass(100, 3.0, of_prompt=True)
    assert made.pays(FREE, NONE, 1.0)  # the prompt counts at the end
    made.end_text()
    assert not made.pays(FREE, NONE, 1.0)
    outcomes(made, 1, asked=3, accepted=3, emitted=4)
    assert made.pays(FREE, NONE, 1.0)


def test_it_may_take_two_percent_of_the_time_to_find_out():
    made = payoff()
    made.record_pass(50, 1.0, of_prompt=False)
    assert made.pays(FREE, NONE, 1.0)  # the draft goes on
    outcomes(made, 49, asked=0, accepted=0)
    assert not made.pays(FREE, NONE, 1.0)
    outcomes(made, 2, asked=0, accepted=0)
    assert made.pays(FREE, NONE, 1.0)


@pytest.mark.parametrize(("accepted", "passes"), [(0, 1), (1, 50)])
def test_with_a_number_of_nodes_a_draft_is_as_deep_as_its_tokens_are_accepted(accepted, passes):
    made = payoff()
    # Nothing is known.
    assert made.pays(None, NONE, 1.0, 5) and not made.pays(None, NONE, 1.0, 6)
    outcomes(made, 200, asked=1, accepted=accepted)
    assert [made.pays(None, NONE, 1.0, each) for each in (0, passes)] == [True, accepted == 1]


@pytest.mark.parametrize(
    ("known", "counts"), [([], (3, 2, 2)), ([5], (2, 1, 1)), ([5, 6, 7], (0, 0, 0))]
)
def test_it_counts_what_was_accepted_where_no_other_source_was_right(known, counts):
    drafted = DraftTree.chain([5, 6, 8])
    assert outcome(DraftTree.chain(known), drafted, np.array([5, 6, 7])) == counts
