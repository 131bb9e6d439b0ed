"""The weight of the neighbours that is chosen on held-out text."""

from __future__ import annotations

import json
import math

import pytest
import torch
from knn_texts import CORPUS, HELD_OUT, generate

from hf_refspec.ralm.knn_datastore import KnnDatastore
from hf_refspec.ralm.mixture import Mixture
from hf_refspec.ralm.perplexity import perplexity
from hf_refspec.store.files import DatastoreError


@pytest.fixture(scope="module")
def tuned(byte_llama, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("tuned") / "store"
    options = {"held_out": HELD_OUT, "progress": False}
    return KnnDatastore.build(byte_llama, tokenizer, CORPUS, path, **options)


def test_what_was_chosen_is_kept(tuned, tmp_path):
    chosen = tuned.config.interpolation
    assert chosen.tokens > 100
    assert chosen.perplexity < chosen.perplexity_alone
    tuned.save_pretrained(tmp_path / "copy")
    assert KnnDatastore.from_pretrained(tmp_path / "copy").config.interpolation == chosen
    assert [file.name for file in tuned.path.iterdir() if "lock" in file.name] == []


def test_perplexity_takes_it_from_there(byte_llama, tokenizer, tuned):
    chosen = tuned.config.interpolation
    alone = perplexity(byte_llama, tokenizer, HELD_OUT)
    assert alone == pytest.approx(chosen.perplexity_alone, rel=1e-4)
    found = perplexity(byte_llama, tokenizer, HELD_OUT, tuned)
    assert found == pytest.approx(chosen.perplexity, rel=1e-3)
    assert perplexity(byte_llama, tokenizer, HELD_OUT, tuned, lambda_=0) == pytest.approx(alone)


def test_the_text_is_the_same_with_every_speculation(byte_llama, inputs, tuned):
    options = {"k": None, "lambda_": None, "temperature": None, "max_new_tokens": 20}
    for do_sample in (False, True):
        options["do_sample"] = do_sample
        plain = generate(byte_llama, inputs, tuned, speculation=None, **options)
        for speculation in ("", "psa"):
            ids = generate(byte_llama, inputs, tuned, speculation=speculation, **options)
            assert torch.equal(ids, plain), speculation


def test_a_lambda_that_is_given_counts_at_all_distances(tuned):
    chosen = tuned.config.interpolation
    mixture = Mixture(tuned, None, 0.3, None)
    assert (mixture.k, mixture.temperature) == (chosen.k, chosen.temperature)
    assert str(mixture) == f"lambda 0.30, temperature {chosen.temperature:.3g}, k {chosen.k}"
    assert str(Mixture(tuned, None, None, None)) == str(chosen)


def test_without_a_choice_the_defaults_are_those_of_the_paper(store):
    found = str(Mixture(store, None, None, None))
    assert found == f"lambda 0.25, temperature 1, k {len(store)}"


def test_too_little_text_is_refused_and_nothing_stays(byte_llama, tokenizer, tmp_path):
    for held_out in ("x", [], "def f(x)"):
        options = {"held_out": held_out, "progress": False}
        with pytest.raises(ValueError, match="too few to choose lambda on"):
            KnnDatastore.build(byte_llama, tokenizer, CORPUS, tmp_path / "s", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.0},
        {"temperature": math.inf},
        {"lambdas": [1.5, 0.5]},
        {"lambdas": [math.nan, 0.5]},
        {"lambdas": [0.5]},
        {"distances": [3.0, 2.0], "lambdas": [0.5, 0.4, 0.3]},
        {"k": 10**6},
    ],
)
def test_what_cannot_have_been_chosen_is_refused(tuned, tmp_path, change):
    tuned.save_pretrained(tmp_path / "copy")
    path = tmp_path / "copy" / "config.json"
    content = json.loads(path.read_text())
    content["interpolation"] |= {"distances": [2.0], "lambdas": [0.5, 0.4]} | change
    path.write_text(json.dumps(content))
    with pytest.raises(DatastoreError, match="is damaged"):
        KnnDatastore(tmp_path / "copy")
