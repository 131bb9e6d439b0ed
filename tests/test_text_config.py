"""What a configuration says of the decoder, wherever it stands."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, LlavaConfig, MambaConfig, MptConfig

from hf_refspec.text_config import context_length, text_config

CONFIG = LlamaConfig(max_position_embeddings=20, vocab_size=7)


def test_a_model_and_its_configuration_name_the_same_decoder(llama):
    assert text_config(llama) == text_config(llama.config) == llama.config
    assert text_config(LlavaConfig(text_config=CONFIG)).vocab_size == 7


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (CONFIG, 20),
        (LlavaConfig(text_config=CONFIG), 20),
        (MptConfig(max_seq_len=30), 30),
        (MambaConfig(), None),
    ],
)
def test_the_context_is_as_long_as_the_configuration_says(config, length):
    assert context_length(config) == length
