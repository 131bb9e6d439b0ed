"""Calls in several threads on one model, drafted and plain, do not affect each other."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import hf_refspec as rs
from hf_refspec.ralm.knn_datastore import recorded
from tests.helpers.calls import GREEDY, padded_prompts

OPTIONS = {**GREEDY, "max_new_tokens": 12}
THREADS, CALLS = 4, 40


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_calls_of_different_rows_return_what_each_returns_alone(models_by_type, model_type):
    model = models_by_type(model_type)
    inputs = [padded_prompts(rows=1 + i % 3, length=12 + i % 5, seed=i) for i in range(15)]
    plain = [model.generate(**each, **OPTIONS).tolist() for each in inputs]

    def call(i: int) -> list[list[int]]:
        drafted = {} if i % 4 else {"candidate_generator": None}
        return model.generate(**inputs[i % len(inputs)], **OPTIONS, **drafted).tolist()

    with rs.attach(model), ThreadPoolExecutor(THREADS) as pool:
        for i, ids in enumerate(pool.map(call, range(CALLS))):
            assert ids == plain[i % len(inputs)]


def test_hidden_states_of_another_threads_passes_are_not_recorded(llama):
    inputs = padded_prompts(rows=2)["input_ids"]
    with torch.no_grad(), ThreadPoolExecutor(1) as pool, recorded(llama, "last_mlp") as hidden:
        llama(inputs[:1])
        own = hidden.last()
        pool.submit(torch.no_grad()(llama), inputs[1:]).result()
        assert (hidden.last() == own).all()
