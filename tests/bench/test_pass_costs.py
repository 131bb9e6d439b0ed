"""Forward passes over 1 to 64 tokens are timed."""

from __future__ import annotations

import pytest

from hf_refspec.bench.models import random_model
from hf_refspec.bench.pass_costs import ROUNDS, measure_pass_costs


def test_each_number_of_tokens_is_timed_in_each_round():
    costs = measure_pass_costs(random_model("tiny", 64))
    assert list(costs["seconds"]) == ["1", "2", "4", "8", "16", "32", "64"]
    assert all(len(seconds) == ROUNDS for seconds in costs["seconds"].values())
    assert min(map(min, costs["seconds"].values())) > 0


@pytest.mark.parametrize(("context", "sizes"), [(40, 6), (9, 4), (100, 7)])
def test_a_small_context_holds_fewer_tokens(context, sizes):
    model = random_model("tiny", 64)
    model.config.max_position_embeddings = context
    costs = measure_pass_costs(model)
    assert len(costs["seconds"]) == sizes and costs["context"] >= 1
    assert costs["parameters"] == model.num_parameters()
