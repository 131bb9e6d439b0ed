"""A pickled drafter holds what it is, and nothing of the calls that it has served."""

import copy
import pickle

import dill
import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_refspec as rs
from hf_refspec import Blend
from hf_refspec.drafting.blend import as_drafter
from tests.helpers.architectures import small
from tests.helpers.datastores import write_store

PROMPTS = torch.tensor([[5, 9, 12, 7, 5, 9, 33, 12, 7], [4, 8, 6, 3, 4, 8, 6, 3, 4]])
OPTIONS = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
SEEN = [5, 9, 12, 7, 33, 5, 9, 12, 8]


@pytest.fixture
def store(tmp_path) -> rs.Datastore:
    return write_store(tmp_path / "store", [SEEN], 50, ())


def sessions() -> rs.SessionDrafts:
    """Too small to remember a call."""
    drafter = rs.SessionDrafts(max_tokens=12)
    drafter.add([5, 9], SEEN)
    return drafter


def taught(tokenizer, model) -> rs.TokenRecycling:
    return rs.TokenRecycling.build([SEEN], tokenizer, model, progress=False)


def look_up() -> PromptLookupCandidateGenerator:
    return PromptLookupCandidateGenerator(num_output_tokens=5, max_matching_ngram_size=2)


MAKERS = {
    "references": lambda *_: rs.ReferenceCopy([SEEN]),
    "LLMA": lambda *_: rs.ReferenceCopy([SEEN], published=True),
    "recycling": lambda *_: rs.TokenRecycling(),
    "built": lambda model, tokenizer, _: taught(tokenizer, model),
    "siblings": lambda *_: rs.SiblingCopy(),
    "sessions": lambda *_: sessions(),
    "datastore": lambda _, __, store: rs.DatastoreDrafts(store),
    "assistant": lambda *_: rs.DraftModel(small("llama")),
    "grammar": lambda _, tokenizer, __: rs.GrammarDrafts(tokenizer, regex="[ab]+(;end|,more)"),
    "auto": lambda *_: as_drafter("auto"),
    "generator": lambda *_: as_drafter(look_up()),
    "blend": lambda *_: rs.ReferenceCopy() | rs.TokenRecycling() | sessions(),
    "blend of others": lambda _, __, store: Blend(["auto", store, look_up()]),
}


@pytest.mark.parametrize("name", MAKERS)
def test_calls_change_no_pickle_of_a_drafter(name, byte_llama, tokenizer, store):
    if name == "grammar":
        pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    model = byte_llama if name != "assistant" else small("llama")
    drafter = MAKERS[name](model, tokenizer, store)
    before = pickle.dumps(drafter), dill.dumps(drafter)
    for rows in (1, 2, 2):
        options = {**OPTIONS, "candidate_generator": drafter, "max_draft_tokens": 8}
        model.generate(PROMPTS[:1].repeat(rows, 1), **options)
    assert drafter.stats.drafted > 0 or name == "grammar"  # whose text the model does not write
    assert (pickle.dumps(drafter), dill.dumps(drafter)) == before
    model.generate(PROMPTS, **{**options, "candidate_generator": pickle.loads(before[0])})


def test_a_map_over_a_function_that_holds_a_drafter_is_computed_once(byte_llama):
    datasets = pytest.importorskip("datasets", reason="the extra `datastore` is not installed")
    texts = datasets.Dataset.from_dict({"ids": PROMPTS.tolist()})
    drafter = rs.ReferenceCopy() | rs.TokenRecycling() | rs.SiblingCopy()

    def answered(row):
        ids = torch.tensor([row["ids"]])
        return {"text": byte_llama.generate(ids, candidate_generator=drafter, **OPTIONS)[0]}

    answered({"ids": PROMPTS[0].tolist()})
    first = texts.map(answered)
    assert texts.map(answered)._fingerprint == first._fingerprint


def test_sessions_are_what_a_pickle_of_them_is(byte_llama):
    drafter = rs.SessionDrafts()
    byte_llama.generate(PROMPTS[:1], candidate_generator=drafter, **OPTIONS)
    assert len(pickle.loads(pickle.dumps(drafter))) == 1


def test_a_table_that_was_built_or_saved_is_in_a_pickle_and_what_calls_add_in_a_copy(
    byte_llama, tokenizer, tmp_path
):
    drafter = taught(tokenizer, byte_llama)
    built = len(drafter)
    byte_llama.generate(PROMPTS, candidate_generator=drafter, max_draft_tokens=8, **OPTIONS)
    assert len(copy.deepcopy(drafter)) == len(drafter) > built
    assert len(pickle.loads(pickle.dumps(drafter))) == built
    drafter.save_pretrained(tmp_path / "table")
    assert len(pickle.loads(pickle.dumps(drafter))) == len(drafter)
