"""A prediction is drafted from in its own request, and in no other."""

from __future__ import annotations

import numpy as np
from architectures import VOCAB_SIZE

from hf_refspec import Blend, Observation
from hf_refspec.apps.serve.prediction import Prediction

PROMPT = np.array([3, 4, 5])


def test_it_drafts_what_followed_the_last_tokens_in_the_prediction_and_not_in_the_prompt():
    drafter = Prediction()
    drafter.ids = np.array([7, 8, 9, 10])
    with drafter.session(PROMPT, VOCAB_SIZE):
        assert len(drafter.draft(4)) == 0
        drafter.observe(Observation(np.array([7, 8])))
        assert drafter.draft_chain(4).tokens.tolist() == [9, 10]
        assert drafter.draft(4).tokens.tolist() == [9, 10]
        drafter.observe(Observation(np.array([3])))
        assert 4 not in drafter.draft(4).tokens


def test_a_request_without_one_drafts_nothing_and_a_blend_keeps_what_it_learned():
    drafter = Prediction()
    blend = Blend([drafter])
    for ids, expected in ((np.array([7, 8, 9]), [8, 9]), (None, []), (np.array([7, 6]), [6])):
        drafter.ids = ids
        with blend.session(PROMPT, VOCAB_SIZE):
            blend.observe(Observation(np.array([7])))
            assert blend.draft(4).tokens.tolist() == expected
            blend.observe(Observation(np.array([*expected, 1])))
        assert blend.stats.sources[0].first == len(expected)
    assert drafter is blend.drafters[0]
