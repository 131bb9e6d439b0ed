"""Drafts through every way in which people call `generate`."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, LogitsProcessorList

import hf_refspec as rs
from tests.helpers.calls import Forced, assert_lossless
from tests.helpers.drafters import Prophet

TEXT = "def area(width, height):\n    return width * height\n\ndef area(width"
OPTIONS = {"max_new_tokens": 40, "do_sample": False}


def test_chat_template_and_generation_config(byte_llama, tokenizer):
    chat = [{"role": "user", "content": "say area area area"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    config = GenerationConfig(max_new_tokens=30, do_sample=True, top_k=7, pad_token_id=0)
    options, texts = {**inputs, "generation_config": config}, []
    for drafter in (None, rs.ReferenceCopy()):
        torch.manual_seed(0)
        texts.append(byte_llama.generate(**options, candidate_generator=drafter).tolist())
    assert texts[0] == texts[1]


def test_stop_strings_of_a_generation_config_or_the_model(byte_llama, tokenizer):
    inputs = tokenizer(TEXT, return_tensors="pt")
    target = tokenizer(TEXT + "(width, height):\n    pass\n", return_tensors="pt").input_ids
    options = {"tokenizer": tokenizer, "logits_processor": LogitsProcessorList([Forced(target)])}
    config = GenerationConfig(max_new_tokens=40, stop_strings=["):"], pad_token_id=0)
    plain = byte_llama.generate(**inputs, generation_config=config, **options)
    assert tokenizer.decode(plain[0]).endswith("height):")
    options |= {"candidate_generator": Prophet(target, accuracy=1.0), "max_draft_tokens": 8}
    drafted = byte_llama.generate(**inputs, generation_config=config, **options)
    assert drafted.tolist() == plain.tolist()
    byte_llama.generation_config.stop_strings = ["):"]
    try:
        drafted = byte_llama.generate(**inputs, max_new_tokens=40, **options)
        del options["tokenizer"]
        with pytest.raises(ValueError, match="tokenizer"):
            byte_llama.generate(**inputs, max_new_tokens=40, **options)
    finally:
        byte_llama.generation_config.stop_strings = None
    assert drafted.tolist() == plain.tolist()


def test_a_peft_model(fresh_llama):
    config = LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    torch.manual_seed(1)
    model = get_peft_model(fresh_llama, config).eval()
    assert assert_lossless(model, 0.9, max_new_tokens=40).mat > 2
