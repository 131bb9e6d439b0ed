"""What a model is given to read, and whether it fits."""

from __future__ import annotations

import copy

import pytest
from transformers import LlamaConfig, MambaConfig

from hf_refspec.apps.shared.default_model import load_config
from hf_refspec.apps.shared.prompts import (
    assistant,
    chat_inputs,
    check_chat_template,
    text_inputs,
    tokens_left,
    user,
    with_document,
)

CONFIG = LlamaConfig(max_position_embeddings=20)


def test_a_chat_is_what_the_template_says_up_to_the_answer(tokenizer):
    messages = [user("a"), assistant("b"), user("c")]
    inputs = chat_inputs(tokenizer, messages)
    expected = "user: a\nassistant: b\nuser: c\nassistant: "
    assert tokenizer.decode(inputs["input_ids"][0]) == expected
    assert inputs["attention_mask"].all()


def test_a_document_stands_before_the_question():
    assert with_document("\na text\n\n", "why?") == "a text\n\nwhy?"


@pytest.mark.parametrize(("length", "left"), [(1, 10), (10, 10), (11, 9), (19, 1)])
def test_new_tokens_end_where_the_context_does(tokenizer, length, left):
    inputs = text_inputs(tokenizer, "x" * length)
    assert tokens_left(inputs, CONFIG, "the prompt", "shorten it", 10) == left


def test_a_prompt_without_room_for_an_answer_is_refused_with_both_lengths(tokenizer):
    inputs = text_inputs(tokenizer, "x" * 1234)
    with pytest.raises(ValueError, match=r"the prompt has 1,234 tokens.*holds 20 .*; shorten it"):
        tokens_left(inputs, CONFIG, "the prompt", "shorten it", 1)


def test_a_model_without_positions_reads_any_length(tokenizer):
    inputs = text_inputs(tokenizer, "x" * 1234)
    assert tokens_left(inputs, MambaConfig(), "the prompt", "shorten it", 7) == 7


def test_a_missing_template_or_model_is_named(tokenizer, tmp_path):
    check_chat_template(tokenizer, "some/model", "do this")
    other = copy.copy(tokenizer)
    other.chat_template = None
    with pytest.raises(ValueError, match="some/model has no chat template; do this"):
        check_chat_template(other, "some/model", "do this")
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        load_config(str(tmp_path))
