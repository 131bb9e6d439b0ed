"""A replay says the recorded answers and counts what a drafter saves."""

from __future__ import annotations

import numpy as np
from drafters import Noise, Prophet
from replay import replay, stand_in_model, walk

from hf_refspec.apps.bench.suites import RecordedAnswer
from hf_refspec.drafting.reference_copy import ReferenceCopy

ANSWERS = [RecordedAnswer([1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 2]), RecordedAnswer([3], [7, 2])]


def test_counts_every_token_and_pass():
    model = stand_in_model(64)
    stats = replay(ANSWERS, Noise(), model, max_draft_tokens=0)
    assert (stats.tokens, stats.forward_passes, stats.mat) == (9, 9, 1.0)
    perfect = Prophet([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 2], accuracy=1.0, branches=0)
    stats = replay(ANSWERS[:1], perfect, model, max_draft_tokens=3)
    assert (stats.tokens, stats.forward_passes) == (7, 3)  # the prefill, 3 + 1, 1 + 1


def test_a_walk_counts_as_a_replay_does():
    model = stand_in_model(64)
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 4, (3, 60)).tolist()
    answers = [RecordedAnswer(ids[:20], ids[20:]) for ids in texts]
    for drafter in (ReferenceCopy(), ReferenceCopy(mode="llma")):
        replayed = replay(answers, drafter, model, 16)
        walked = walk(answers, drafter, 64, 16)
        assert walked.tokens == replayed.tokens == 120
        assert walked.forward_passes == replayed.forward_passes
        assert walked.accepted_lengths == replayed.accepted_lengths
