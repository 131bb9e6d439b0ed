"""What a model is given to read, and whether it fits."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, MambaConfig

from hf_refspec.apps.shared.prompts import (
    assistant,
    chat_inputs,
    text_inputs,
    tokens_left,
    user,
)

CONFIG = LlamaConfig(max_position_embeddings=20)


def test_a_chat_is_what_the_template_says_up_to_the_answer(tokenizer):
    messages = [user("a"), assistant("b"), user("c")]
    inputs = chat_inputs(tokenizer, messages)
    expected = "user: a\nassistant: b\nuser: c\nassistant: "
    assert tokenizer.decode(inputs["input_ids"][0]) == expected
    assert inputs["attention_mask"].all()


@pytest.mark.parametrize(
    ("config", "length", "left"),
    [(CONFIG, 1, 10), (CONFIG, 10, 10), (CONFIG, 19, 1), (MambaConfig(), 1234, 10)],
)
def test_new_tokens_end_where_the_context_does(tokenizer, config, length, left):
    inputs = text_inputs(tokenizer, "x" * length)
    assert tokens_left(inputs, config, "the prompt", "shorten it", 10) == left


def test_a_prompt_without_room_for_an_answer_is_refused_with_both_lengths(tokenizer):
    inputs = text_inputs(tokenizer, "x" * 1234)
    with pytest.raises(ValueError, match=r"the prompt has 1,234 tokens.*holds 20 .*; shorten it"):
        tokens_left(inputs, CONFIG, "the prompt", "shorten it", 1)
