"""What holds of every source: calls, copies, paths, and that it changes no id."""

import copy
import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch

import hf_refspec as rs
from hf_refspec import Drafter, DraftTree
from hf_refspec.apps.serve.engine import Prediction
from hf_refspec.drafting.calls import drafter_call
from hf_refspec.drafting.contract import Call, Observation
from tests.helpers.architectures import VOCAB_SIZE
from tests.helpers.calls import PROMPT, assert_lossless
from tests.helpers.datastores import write_store
from tests.helpers.drafters import drafted

TEXT, PATH = np.array([20, 21, 1]), np.array([2, 3])
SEEN = [*[1, 2, 3, 4, 5, 6, 30, 2, 3, 4, 7], *[1, 2, 3, 4, 5, 6, 30, 2, 3, 4, 7]]


def datastore(folder, seen, **options) -> Drafter:
    return rs.DatastoreDrafts(write_store(folder / "store", [seen], VOCAB_SIZE, ()), **options)


def compact(folder, seen) -> Drafter:
    return rs.DatastoreDrafts(datastore(folder, seen).store.compact(folder / "c", progress=False))


def sessions(folder, seen, **options) -> Drafter:
    cache = rs.SessionDrafts(**options)
    cache.add([20, 21], seen)
    return cache


def recycling(folder, seen, **options) -> Drafter:
    drafter = rs.TokenRecycling(**options)
    with drafter_call(drafter, [np.array(seen[:1])], VOCAB_SIZE):
        for token, following in pairwise(seen[1:]):
            best = [following, *range(40, 39 + drafter.top_k)]
            probs = [0.8, *[0.01] * (drafter.top_k - 1)]
            top = np.array([best], np.int32), np.array([probs], np.float32)
            drafter.observe(Observation(np.array([token]), DraftTree.empty(), None, *top))
    return drafter


def prediction() -> Drafter:
    drafter = Prediction()
    drafter.lend(rs.ReferenceCopy([SEEN]))
    return drafter


MAKERS = {
    "references": lambda _, seen: rs.ReferenceCopy([seen], include_prompt=False),
    "LLMA": lambda _, seen: rs.ReferenceCopy([seen], published=True),
    "datastore": datastore,
    "REST": lambda folder, seen: datastore(folder, seen, published=True),
    "compact": compact,
    "sessions": lambda folder, seen: sessions(folder, seen, top_k=2),
    "recycling": lambda folder, seen: recycling(folder, seen, top_k=2),
}
FORGET = ("references", "LLMA", "datastore", "REST", "compact")  # the call itself


@pytest.fixture(params=[*MAKERS, "blend"])
def name(request) -> str:
    return request.param


def made(name: str, folder, seen=SEEN) -> Drafter:
    if name == "blend":
        return rs.ReferenceCopy([seen]) | sessions(folder, seen)
    return MAKERS[name](folder, seen)


@pytest.mark.parametrize("name", [*MAKERS, "prediction"])
def test_it_says_what_it_would_draft_behind_a_path(name, tmp_path):
    drafter = prediction() if name == "prediction" else made(name, tmp_path)
    with drafter_call(drafter, [TEXT], VOCAB_SIZE):
        before = drafter.draft(8, Call())
        continued = drafter.continue_path(PATH, 8, Call()).checked(VOCAB_SIZE)
        again = drafter.draft(8, Call())
        drafter.observe(Observation(PATH))
        there = drafter.draft(8, Call())
    assert len(continued) > 0
    if name == "recycling":  # it has counted the path's tokens by then
        assert continued.tokens[0] == there.tokens[0]
    else:
        assert continued.tokens.tolist() == there.tokens.tolist()
        assert continued.probs.tolist() == pytest.approx(there.probs.tolist())
    # It leaves the text as it was.
    assert again.tokens.tolist() == before.tokens.tolist()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_drafts_the_same_and_is_another_drafter(name, copied, tmp_path):
    drafter = made(name, tmp_path)
    with drafter_call(drafter, [TEXT], VOCAB_SIZE):
        twin = copied(drafter)  # also of a drafter in use
    if copied is not copy.deepcopy and name in ("recycling", "published"):
        assert len(twin) == 0  # what calls have taught is in no pickle
        return
    drafts = [drafted(each, TEXT, [2, 3], vocab_size=VOCAB_SIZE) for each in (drafter, twin)]
    assert len(drafts[0]) > 0
    assert drafts[0].tokens.tolist() == drafts[1].tokens.tolist()
    assert twin.stats is not drafter.stats


def test_without_a_budget_a_text_or_a_match_the_draft_is_empty(name, tmp_path):
    drafter = made(name, tmp_path)
    assert len(drafted(drafter, TEXT, [2, 3], 0, VOCAB_SIZE)) == 0
    assert len(drafted(drafter, [], (), 8, VOCAB_SIZE)) == 0
    # Token recycling drafts the commonest tokens everywhere.
    assert name == "recycling" or len(drafted(drafter, [45], [46], 8, VOCAB_SIZE)) == 0


@pytest.mark.parametrize("name", FORGET)
def test_a_call_leaves_nothing_behind_for_the_next(name, tmp_path):
    drafter = made(name, tmp_path)
    assert len(drafted(drafter, [45, 46, 1, 2], [2, 3], 8, VOCAB_SIZE)) > 0
    assert len(drafted(drafter, [45], (), 8, VOCAB_SIZE)) == 0


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.3}], ids=str)
def test_ids_are_those_of_plain_decoding(llama, name, options, tmp_path):
    torch.manual_seed(0)
    text = llama.generate(PROMPT, max_new_tokens=40, eos_token_id=None, **options)[0].tolist()
    drafter, accepted = made(name, tmp_path, [*text, *text]), 0
    for verification, nodes in (("tree", 1), ("tree", 40), ("tree", 1024), ("chain", 8)):
        stats = assert_lossless(llama, drafter, PROMPT, verification, nodes, **options)
        accepted += stats.accepted
    assert accepted > 5


@pytest.mark.parametrize(
    ("drafter", "printed"),
    [
        (rs.ReferenceCopy(references=[[1, 2]]), "ReferenceCopy()"),
        (
            rs.ReferenceCopy(published=True, copy_length=18),
            "ReferenceCopy(copy_length=18, published=True)",
        ),
        (rs.TokenRecycling(top_k=4) | rs.SiblingCopy(), "TokenRecycling(top_k=4) | SiblingCopy()"),
    ],
)
def test_its_printed_form(drafter, printed):
    assert repr(drafter) == printed
