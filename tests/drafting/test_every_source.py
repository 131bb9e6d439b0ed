"""What holds of every source: calls, copies, pickles, paths, and that it changes no id."""

import copy
import pickle
from itertools import pairwise

import dill
import numpy as np
import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_refspec as rs
from hf_refspec import Drafter, DraftTree
from hf_refspec.apps.serve.engine import Prediction
from hf_refspec.drafting.blend import as_drafter
from hf_refspec.drafting.calls import drafter_call
from hf_refspec.drafting.contract import Call, Observation
from tests.helpers import byte_model
from tests.helpers.architectures import VOCAB_SIZE, small
from tests.helpers.calls import GREEDY, PROMPT, assert_lossless
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


def taught(seen=SEEN) -> rs.TokenRecycling:
    tokenizer = byte_model.byte_tokenizer()
    model = byte_model.byte_llama(len(tokenizer))
    return rs.TokenRecycling.build([seen], tokenizer, model, progress=False)


def grammar() -> rs.GrammarDrafts:
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    return rs.GrammarDrafts(byte_model.byte_tokenizer(), regex="[ab]+(;end|,more)")


def look_up() -> PromptLookupCandidateGenerator:
    return PromptLookupCandidateGenerator(num_output_tokens=5, max_matching_ngram_size=2)


OTHERS = {
    "built": lambda _, seen: taught(seen),
    "new recycling": lambda *_: rs.TokenRecycling(),
    "siblings": lambda *_: rs.SiblingCopy(),
    # Too small to remember a call.
    "few sessions": lambda folder, seen: sessions(folder, seen, max_tokens=12),
    "assistant": lambda *_: rs.DraftModel(small("llama")),
    "grammar": lambda *_: grammar(),
    "auto": lambda *_: as_drafter("auto"),
    "generator": lambda *_: as_drafter(look_up()),
    "blend of others": lambda folder, seen: rs.Blend(["auto", datastore(folder, seen), look_up()]),
}


@pytest.fixture(params=[*MAKERS, "blend"])
def name(request) -> str:
    return request.param


def made(name: str, folder, seen=SEEN) -> Drafter:
    if name == "blend":
        return rs.ReferenceCopy([seen]) | sessions(folder, seen)
    return (MAKERS | OTHERS)[name](folder, seen)


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
    if copied is not copy.deepcopy and name == "recycling":
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


# --- pickles hold what a drafter is, and nothing of the calls that it has served

PROMPTS = torch.tensor([[5, 9, 12, 7, 5, 9, 33, 12, 7], [4, 8, 6, 3, 4, 8, 6, 3, 4]])


@pytest.mark.parametrize("name", ["references", "LLMA", "datastore", "compact", *OTHERS])
def test_calls_change_no_pickle_of_a_drafter(name, byte_llama, tmp_path):
    model = byte_llama if name != "assistant" else small("llama")
    drafter = made(name, tmp_path, [5, 9, 12, 7, 33, 5, 9, 12, 8])
    before = pickle.dumps(drafter), dill.dumps(drafter)
    options = {**GREEDY, "max_draft_tokens": 8}
    for rows in (1, 2, 2):
        model.generate(PROMPTS[:1].repeat(rows, 1), candidate_generator=drafter, **options)
    assert drafter.stats.drafted > 0 or name == "grammar"  # whose text the model does not write
    assert (pickle.dumps(drafter), dill.dumps(drafter)) == before
    model.generate(PROMPTS, candidate_generator=pickle.loads(before[0]), **options)


def test_a_map_over_a_function_that_holds_a_drafter_is_computed_once(byte_llama):
    datasets = pytest.importorskip("datasets", reason="the extra `datastore` is not installed")
    texts = datasets.Dataset.from_dict({"ids": PROMPTS.tolist()})
    drafter = rs.ReferenceCopy() | rs.TokenRecycling() | rs.SiblingCopy()

    def answered(row):
        ids = torch.tensor([row["ids"]])
        return {"text": byte_llama.generate(ids, candidate_generator=drafter, **GREEDY)[0]}

    answered({"ids": PROMPTS[0].tolist()})
    first = texts.map(answered)
    assert texts.map(answered)._fingerprint == first._fingerprint


def test_sessions_are_what_a_pickle_of_them_is(byte_llama):
    drafter = rs.SessionDrafts()
    byte_llama.generate(PROMPTS[:1], candidate_generator=drafter, **GREEDY)
    assert len(pickle.loads(pickle.dumps(drafter))) == 1


def test_a_table_that_was_built_or_saved_is_in_a_pickle_and_what_calls_add_in_a_copy(
    byte_llama, tmp_path
):
    drafter = taught()
    built = len(drafter)
    byte_llama.generate(PROMPTS, candidate_generator=drafter, max_draft_tokens=8, **GREEDY)
    assert len(copy.deepcopy(drafter)) == len(drafter) > built
    assert len(pickle.loads(pickle.dumps(drafter))) == built
    drafter.save_pretrained(tmp_path / "table")
    assert len(pickle.loads(pickle.dumps(drafter))) == len(drafter)
