"""What a model is given to read, and whether it fits."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, MambaConfig

from hf_refspec.apps.shared.prompts import text_inputs, tokens_left

CONFIG = LlamaConfig(max_position_embeddings=20)


@pytest.mark.parametrize(
    ("config", "length", "left"),
    [(CONFIG, 1, 10), (CONFIG, 10, 10), (CONFIG, 19, 1), (MambaConfig(), 1234, 10)],
)
def test_new_tokens_end_where_the_context_does(tokenizer, config, length, left):
    inputs = text_inputs(tokenizer, "x" * length)
    assert tokens_left(inputs, config, "the prompt", "shorten it", 10) == left
