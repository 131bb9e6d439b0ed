from __future__ import annotations

import math
import pickle

import pytest
import torch
from knn_texts import CORPUS

from hf_refspec.ralm.mixture import Mixture
from hf_refspec.ralm.perplexity import perplexity


def test_perplexity_is_that_of_the_models_own_loss(byte_llama, tokenizer):
    text = CORPUS[0]
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = math.exp(byte_llama(ids, labels=ids).loss)
    assert math.isclose(perplexity(byte_llama, tokenizer, text), expected, rel_tol=1e-4)


def test_perplexity_weighs_the_probability_of_every_token(byte_llama, tokenizer, store):
    text = "for k in range(3):\n    f(k)\n"
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    states = []
    mlp = byte_llama.model.layers[-1].mlp
    handle = mlp.register_forward_pre_hook(lambda module, args: states.append(args[0][0]))
    with torch.no_grad():
        logits = byte_llama(ids[None]).logits[0]
    handle.remove()
    mixture = Mixture(store, 8, 0.4, 3.0)
    total = 0.0
    for position in range(len(ids) - 1):
        (found,) = store.search([states[0][position].numpy()], 8)
        total += float(mixture.log_probs(logits[position], found)[ids[position + 1]])
    expected = math.exp(-total / (len(ids) - 1))
    found = perplexity(byte_llama, tokenizer, text, store, k=8, lambda_=0.4, temperature=3.0)
    assert math.isclose(found, expected, rel_tol=1e-4)


def test_perplexity_of_no_text_is_refused(byte_llama, tokenizer):
    with pytest.raises(ValueError, match="two tokens"):
        perplexity(byte_llama, tokenizer, "x")


def test_perplexity_of_another_tokenizer_is_refused(byte_llama, tokenizer, store):
    other = pickle.loads(pickle.dumps(tokenizer))
    other.add_tokens(["other"])
    with pytest.raises(ValueError, match="another tokenizer"):
        perplexity(byte_llama, other, "text", store, k=1)
