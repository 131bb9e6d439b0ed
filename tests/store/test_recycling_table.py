"""Recycling tables on disk and on the Hub: what comes back, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import hf_refspec as rs
from hf_refspec.drafting.calls import drafter_call
from hf_refspec.drafting.contract import Observation
from hf_refspec.drafting.tree import DraftTree
from hf_refspec.store.hub import card as card_of
from hf_refspec.store.recycling_table import RecyclingTable
from tests.helpers.byte_model import word_tokenizer
from tests.helpers.stored import rewrite

TEXTS = ["the cat sat on the mat, the cat sat on the hat", "a cat and a hat"]


@pytest.fixture(scope="module")
def drafter(byte_llama, tokenizer):
    return rs.TokenRecycling.build(TEXTS, tokenizer, byte_llama, corpus_name="cats", license="MIT")


@pytest.fixture
def folder(tmp_path, drafter) -> Path:
    drafter.save_pretrained(tmp_path / "table")
    return tmp_path / "table"


def assert_equal(drafter, other) -> None:
    one, two = drafter._table.entries(), other._table.entries()
    np.testing.assert_array_equal(one.contexts, two.contexts)
    np.testing.assert_array_equal(one.tokens, two.tokens)
    np.testing.assert_allclose(one.probs, two.probs, atol=1e-3)  # float16 on disk


def test_what_was_built_comes_back(folder, drafter, tokenizer):
    opened = rs.TokenRecycling.from_pretrained(folder, tokenizer)
    assert_equal(drafter, opened)
    assert (opened.top_k, opened.context) == (8, 3)
    stored = RecyclingTable(folder, tokenizer)
    stored.verify()
    card = card_of(stored.config, "owner/table")
    assert "the language model **LlamaForCausalLM** expects next" in card
    assert "| Licence of the corpus | MIT |" in card and "$" not in card


def test_a_table_that_was_opened_goes_on_learning_and_is_saved_again(folder, tokenizer, tmp_path):
    opened = rs.TokenRecycling.from_pretrained(folder, tokenizer)
    before = len(opened)
    with drafter_call(opened, [np.array([4, 5])], len(tokenizer)):
        row = np.array([[9] * 8], np.int32), np.full((1, 8), 0.1, np.float32)
        opened.observe(Observation(np.array([9]), DraftTree.empty(), None, *row))
    opened.save_pretrained(tmp_path / "again")
    again = rs.TokenRecycling.from_pretrained(tmp_path / "again", tokenizer)
    assert len(again) == len(opened) > before
    assert_equal(opened, again)


def test_another_models_name_is_not_given_to_what_was_learned(
    byte_llama, llama, tokenizer, tmp_path
):
    drafter = rs.TokenRecycling.build(["abcabc"], tokenizer, byte_llama)
    with pytest.raises(
        ValueError, match="a vocabulary of 259 tokens, but the target model's has 97"
    ):
        drafter.save_pretrained(tmp_path / "table", tokenizer, llama)
    assert not (tmp_path / "table").exists()


def test_what_was_learned_by_generating_is_saved_with_tokenizer_and_model(
    byte_llama, tokenizer, tmp_path
):
    drafter = rs.TokenRecycling()
    with pytest.raises(ValueError, match="nothing is learned yet"):
        drafter.save_pretrained(tmp_path / "table", tokenizer, byte_llama)
    inputs = tokenizer("abcabc", return_tensors="pt")
    byte_llama.generate(**inputs, max_new_tokens=8, candidate_generator=drafter)
    with pytest.raises(ValueError, match="give the target model's tokenizer="):
        drafter.save_pretrained(tmp_path / "table")
    drafter.save_pretrained(tmp_path / "table", tokenizer, byte_llama)
    assert_equal(drafter, rs.TokenRecycling.from_pretrained(tmp_path / "table", tokenizer))


def test_the_newest_of_a_table_that_is_too_large_are_taken(folder, drafter, tokenizer):
    opened = rs.TokenRecycling.from_pretrained(folder, tokenizer, max_contexts=5)
    newest = drafter._table.entries().contexts[-5:]
    np.testing.assert_array_equal(opened._table.entries().contexts, newest)


def test_a_built_table_drafts_from_the_first_token_on(drafter, byte_llama, tokenizer):
    empty = rs.TokenRecycling()
    inputs = tokenizer(TEXTS[0], return_tensors="pt")
    plain = byte_llama.generate(**inputs, max_new_tokens=20, do_sample=False)
    for each in (drafter, empty):
        options = {"candidate_generator": each, "max_draft_tokens": 16}
        ids = byte_llama.generate(**inputs, max_new_tokens=20, do_sample=False, **options)
        assert ids.tolist() == plain.tolist()
    assert drafter.stats.drafted > empty.stats.drafted


def test_building_learns_the_models_own_next_tokens(byte_llama, tokenizer):
    built = rs.TokenRecycling.build([TEXTS[0]], tokenizer, byte_llama, context=1)
    ids = tokenizer(TEXTS[0], return_tensors="pt")
    best = byte_llama(**ids).logits[0].argmax(-1).tolist()
    last = dict(zip(ids["input_ids"][0].tolist(), best, strict=True))
    entries = built._table.entries()
    assert dict(zip(entries.contexts[:, 0].tolist(), entries.tokens[:, 0], strict=True)) == last


def test_max_tokens_stops_the_reading(byte_llama, tokenizer):
    few = rs.TokenRecycling.build(TEXTS, tokenizer, byte_llama, max_tokens=1)
    one = rs.TokenRecycling.build(TEXTS[:1], tokenizer, byte_llama)
    assert_equal(few, one)


def test_texts_without_tokens_are_refused(byte_llama, tokenizer):
    with pytest.raises(ValueError, match="documents has no text of two tokens or more"):
        rs.TokenRecycling.build(["", "a"], tokenizer, byte_llama)


def test_another_tokenizer_and_another_vocabulary_are_refused(folder, tokenizer):
    with pytest.raises(rs.DatastoreError, match="was made for another tokenizer"):
        rs.TokenRecycling.from_pretrained(folder, word_tokenizer(["<unk>", "the"]))
    opened = rs.TokenRecycling.from_pretrained(folder, tokenizer)
    message = rf"{folder} is from a model with a vocabulary of 259 tokens, but the target .* has 99"
    with pytest.raises(rs.DatastoreError, match=message):
        opened.begin(np.array([1]), 99)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", 260, "tokens has the token 260, but the ids are below 259"),
        ("contexts", 259, "a context is not one of 1 to 3 tokens"),
        ("contexts", 300, "contexts has the token 300"),
        ("probs", np.nan, "a probability is not from 0 to 1"),
        ("probs", 1.5, "a probability is not from 0 to 1"),
        ("counts", np.inf, "a count is not a number from 0 on"),
        ("counts", -1, "a count is not a number from 0 on"),
    ],
)
def test_numbers_out_of_their_range_are_refused(folder, tokenizer, name, value, message):
    array = load_file(folder / "table.safetensors")[name]
    array[0] = value
    rewrite(RecyclingTable(folder, tokenizer), "table_file", **{name: array})
    with pytest.raises(rs.DatastoreError, match=message):
        rs.TokenRecycling.from_pretrained(folder, tokenizer)


@pytest.mark.parametrize(("key", "value"), [("contexts", 0), ("top_k", 3), ("context", 4)])
def test_a_config_that_does_not_fit_is_refused(folder, tokenizer, key, value):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(rs.DatastoreError, match="is damaged"):
        rs.TokenRecycling.from_pretrained(folder, tokenizer)
