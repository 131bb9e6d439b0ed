"""What a source says after a path is what it drafts once the path has become text."""

from __future__ import annotations

import numpy as np
import pytest
from datastores import write_store

import hf_refspec as rs
from hf_refspec import Drafter, DraftTree
from hf_refspec.apps.serve.request_sources import Prediction
from hf_refspec.drafting.calls import drafter_call
from hf_refspec.drafting.observation import Observation

VOCAB_SIZE = 50
PROMPT, PATH = np.array([20, 21, 1]), np.array([2, 3])
SEEN = [1, 2, 3, 4, 5, 6, 30, 2, 3, 4, 7]


def reference_copy(_) -> Drafter:
    return rs.ReferenceCopy([SEEN], include_prompt=False)


def datastore(folder) -> Drafter:
    return rs.DatastoreDrafts(write_store(folder / "store", [SEEN], VOCAB_SIZE, ()))


def retrieval_cache(_) -> Drafter:
    cache = rs.RetrievalCache()
    cache.add([20, 21], SEEN)
    return cache


def token_recycling(_) -> Drafter:
    drafter = rs.TokenRecycling(top_k=2)
    with drafter_call(drafter, [np.array(SEEN[:1])], VOCAB_SIZE):
        for token, following in zip(SEEN[1:], [*SEEN[2:], 8], strict=True):
            top = np.array([[following, 9]], np.int32), np.array([[0.8, 0.1]], np.float32)
            drafter.observe(Observation(np.array([token]), DraftTree.empty(), None, *top))
    return drafter


def prediction(_) -> Drafter:
    drafter = Prediction()
    drafter.source = reference_copy(None)
    return drafter


SOURCES = [reference_copy, datastore, retrieval_cache, token_recycling, prediction]


@pytest.mark.parametrize("make", SOURCES)
def test_it_says_what_it_would_draft_there(make, tmp_path):
    drafter = make(tmp_path)
    with drafter_call(drafter, [PROMPT], VOCAB_SIZE):
        before = drafter.draft(8)
        continued = drafter.continue_path(PATH, 8).checked(VOCAB_SIZE)
        again = drafter.draft(8)
        drafter.observe(Observation(PATH))
        there = drafter.draft(8)
    assert len(continued) > 0
    if make is token_recycling:  # it has counted the path's tokens by then
        assert continued.tokens[0] == there.tokens[0]
    else:
        assert continued.tokens.tolist() == there.tokens.tolist()
        assert continued.probs.tolist() == pytest.approx(there.probs.tolist())
    # It leaves the text as it was.
    assert again.tokens.tolist() == before.tokens.tolist()
