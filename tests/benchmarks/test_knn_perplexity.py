"""The perplexity of a kNN-LM is that of the distribution which it generates from."""

from __future__ import annotations

import math

import knn_perplexity
import pytest
import torch
from knn_texts import CORPUS

from hf_refspec.ralm.hidden_states import recorded
from hf_refspec.ralm.knn_datastore import KnnDatastore
from hf_refspec.ralm.knn_lm import Mixture

TEXT = "for k in range(3):\n    f(k)\n"


@pytest.fixture(scope="module")
def store(byte_llama, tokenizer, tmp_path_factory) -> KnnDatastore:
    path = tmp_path_factory.mktemp("knn") / "store"
    return KnnDatastore.build(byte_llama, tokenizer, CORPUS, path, progress=False)


def test_perplexity_is_that_of_the_models_loss_and_of_the_mixture(byte_llama, tokenizer, store):
    reading = knn_perplexity.read(byte_llama, tokenizer, store, [TEXT], k=8, most=999)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad(), recorded(byte_llama, "last_mlp") as hidden:
        output = byte_llama(ids, labels=ids)
    assert reading.perplexity(0) == pytest.approx(math.exp(output.loss), rel=1e-4)
    mixture, total = Mixture(store, 8, 0.4, 3.0), 0.0
    for position, token in enumerate(ids[0, 1:].tolist()):
        (found,) = store.search([hidden.states[0, position].numpy()], 8)
        total += float(mixture.log_probs(output.logits[0, position], found)[token])
    expected = math.exp(-total / (ids.shape[1] - 1))
    assert reading.perplexity(0.4, 3.0) == pytest.approx(expected, rel=1e-4)


def test_the_table_has_a_row_for_each_lambda(
    byte_llama, tokenizer, store, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    byte_llama.save_pretrained("model")
    tokenizer.save_pretrained("model")
    (tmp_path / "text.txt").write_text(TEXT)
    knn_perplexity.main([str(store.path), "text.txt", "--model", "model", "--tokens", "20"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"20 tokens, k={len(store)}"
    table = [line.split("|")[1:-1] for line in lines if line.startswith("| 0")]
    assert [float(row[0]) for row in table] == list(knn_perplexity.LAMBDAS)
    assert {len(row) for row in table} == {1 + len(knn_perplexity.TEMPERATURES)}


def test_a_text_without_two_tokens_is_refused(byte_llama, tokenizer, store):
    with pytest.raises(ValueError, match="two tokens"):
        knn_perplexity.read(byte_llama, tokenizer, store, ["x"], k=1, most=9)
