"""How far estimates are from what was accepted."""

from __future__ import annotations

import numpy as np
import pytest

from hf_refspec import Drafter, DraftTree
from hf_refspec.bench.reliability import calibration_error, foreseen, judge_drafts, reliability
from hf_refspec.bench.suites import RecordedAnswer


class Oracle(Drafter):
    """Foresees the next token with a chance, and says so or boasts."""

    def __init__(self, answer: list[int], chance: float, says: float):
        self.answer, self.chance, self.says = answer, chance, says
        self.random = np.random.default_rng(0)

    def begin(self, prompt_ids, vocab_size):
        self.place = 0

    def observe(self, tokens, verified, logits):
        self.place += len(tokens)

    def draft(self, budget):
        right = self.random.random() < self.chance
        token = self.answer[self.place] if right else 99
        return DraftTree.chain([token], [self.says])


ANSWER = [token % 7 for token in range(4000)]


@pytest.mark.parametrize("says", [0.3, 0.8])
def test_the_error_is_how_far_estimates_are_off(says):
    drafter = Oracle(ANSWER, 0.3, says)
    answers = [RecordedAnswer([1, 2], ANSWER)]
    bins = reliability(*judge_drafts(drafter, answers, 100, skipped_tokens=0))
    assert calibration_error(bins) == pytest.approx(says - 0.3, abs=0.03)


def test_what_comes_before_anything_was_learned_does_not_count():
    answers = [RecordedAnswer([1], ANSWER[:60]), RecordedAnswer([1], ANSWER[:60])]
    for skipped, drafts in ((0, 118), (60, 59), (100, 20)):
        estimates, _ = judge_drafts(Oracle(ANSWER, 0.0, 0.5), answers, 100, skipped)
        assert len(estimates) == drafts


def test_a_node_is_foreseen_with_all_of_its_path():
    tree = DraftTree(
        np.array([4, 5, 6, 5]), np.array([-1, -1, 0, 2], np.int32), np.ones(4, np.float32)
    )
    assert foreseen(tree, np.array([4, 6, 7])).tolist() == [True, False, True, False]
    assert foreseen(tree, np.array([4])).tolist() == [True, False, False, False]
    assert not foreseen(tree, np.array([9, 4, 6])).any()


def test_each_tenth_of_estimates_is_judged_by_itself():
    estimates = np.array([0.05, 0.15, 0.15, 1.0], np.float32)
    outcomes = np.array([False, True, False, True])
    bins = reliability(estimates, outcomes)
    assert bins == [
        (1, pytest.approx(0.05), 0.0),
        (2, pytest.approx(0.15), 0.5),
        (1, pytest.approx(1.0), 1.0),
    ]
    assert calibration_error(bins) == pytest.approx((0.05 + 2 * 0.35) / 4)
