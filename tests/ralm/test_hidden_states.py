"""The hidden states of a model while it runs."""

from __future__ import annotations

import pytest
import torch

from hf_refspec.ralm.hidden_states import recorded
from hf_refspec.text_config import text_config
from tests.helpers.architectures import ARCHITECTURES


@pytest.mark.parametrize("architecture", ARCHITECTURES[:4], ids=str)
def test_the_last_mlp_is_found_in_many_architectures(architecture, models_by_type):
    model, ids = models_by_type(architecture.model_type), torch.tensor([[3, 5, 7]])
    with torch.no_grad():
        with recorded(model, "last_hidden") as last:
            model.base_model(ids, use_cache=False)
        with recorded(model, "last_mlp") as hidden:
            model.base_model(ids, use_cache=False)
    assert hidden.states.shape == last.states.shape == (1, 3, text_config(model).hidden_size)
    assert not torch.allclose(hidden.states, last.states)


def test_a_model_without_an_mlp_is_told_what_to_do(models_by_type):
    model = models_by_type("opt")
    expected = pytest.raises(ValueError, match='pass layer="last_hidden"')
    with expected, recorded(model, "last_mlp"):
        pass
