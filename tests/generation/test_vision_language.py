"""Texts about an image equal plain decoding's in float32, drafted where the probe allows it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from architectures import VOCAB_SIZE
from drafters import Prophet, Prophets
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Idefics2Config,
    Idefics2ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    IdeficsConfig,
    IdeficsForVisionText2Text,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MllamaConfig,
    MllamaForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

import hf_refspec as rs

Inputs = dict[str, torch.Tensor]

IMAGE, VIDEO, VISION_START, VISION_END = 9, 8, 7, 6  # tokens
OPTIONS = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {
    **TOKENS,
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
GEMMA = {**TEXT, "head_dim": 8}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
UNTIED = {"tie_word_embeddings": False, **TOKENS}


def prompts(rows: int, image_tokens: int) -> torch.Tensor:
    """Three tokens, an image, eleven tokens."""
    ids = torch.randint(10, VOCAB_SIZE, (rows, 14), generator=torch.Generator().manual_seed(1))
    ids[:, 2] = VISION_START
    return torch.cat([ids[:, :3], torch.full((rows, image_tokens), IMAGE), ids[:, 3:]], dim=1)


def pixels(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def llava(rows: int) -> tuple[PreTrainedModel, Inputs]:
    config = LlavaConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", **VISION},
        image_token_index=IMAGE,
        **UNTIED,
    )
    ids = prompts(rows, 4)
    inputs = {"input_ids": ids, "pixel_values": pixels(rows, 3, 8, 8)}
    return LlavaForConditionalGeneration(config), inputs


def paligemma(rows: int) -> tuple[PreTrainedModel, Inputs]:
    config = PaliGemmaConfig(
        text_config={"model_type": "gemma", **GEMMA},
        vision_config={"model_type": "siglip_vision_model", **VISION},
        image_token_index=IMAGE,
        projection_dim=32,
        **UNTIED,
    )
    ids = prompts(rows, 4)
    inputs = {"input_ids": ids, "pixel_values": pixels(rows, 3, 8, 8)}
    inputs["token_type_ids"] = torch.zeros_like(ids)  # all of a prompt sees all of it
    return PaliGemmaForConditionalGeneration(config), inputs


def gemma3(rows: int) -> tuple[PreTrainedModel, Inputs]:
    config = Gemma3Config(
        text_config={**GEMMA, "sliding_window": 16},
        vision_config=VISION,
        image_token_index=IMAGE,
        boi_token_index=VISION_START,
        eoi_token_index=VISION_END,
        mm_tokens_per_image=4,
        **UNTIED,
    )
    ids = prompts(rows, 4)
    inputs = {"input_ids": ids, "pixel_values": pixels(rows, 3, 8, 8)}
    inputs["token_type_ids"] = (ids == IMAGE).long()
    return Gemma3ForConditionalGeneration(config), inputs


def qwen_vl(rows: int, kind: type, config_class: type, **vision: Any) -> Any:
    config = config_class(
        text_config={**TEXT, "head_dim": 8, "rope_parameters": MROPE},
        vision_config={
            "hidden_size": 32,
            "depth": 2,
            "num_heads": 4,
            "patch_size": 4,
            "temporal_patch_size": 1,
            "intermediate_size": 48,
            **vision,
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        **UNTIED,
    )
    ids = prompts(rows, 4)  # of 16 patches
    inputs = {"input_ids": ids, "pixel_values": pixels(16 * rows, 3 * 4 * 4)}
    inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * rows)
    inputs["mm_token_type_ids"] = (ids == IMAGE).long()
    return kind(config), inputs


def qwen2_vl(rows: int) -> tuple[PreTrainedModel, Inputs]:
    return qwen_vl(rows, Qwen2VLForConditionalGeneration, Qwen2VLConfig, embed_dim=32)


def qwen2_5_vl(rows: int) -> tuple[PreTrainedModel, Inputs]:
    vision = {"out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]}
    return qwen_vl(rows, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig, **vision)


def qwen3_vl(rows: int) -> tuple[PreTrainedModel, Inputs]:
    vision = {"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return qwen_vl(rows, Qwen3VLForConditionalGeneration, Qwen3VLConfig, **vision)


def idefics2(rows: int) -> tuple[PreTrainedModel, Inputs]:
    config = Idefics2Config(
        text_config={"model_type": "mistral", **TEXT, "sliding_window": None},
        vision_config=VISION,
        perceiver_config={
            "hidden_size": 32,
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 4,
            "resampler_head_dim": 8,
            "num_key_value_heads": 2,
        },
        image_token_id=IMAGE,
        **UNTIED,
    )
    inputs = {"input_ids": prompts(rows, 4), "pixel_values": pixels(rows, 1, 3, 8, 8)}
    return Idefics2ForConditionalGeneration(config), inputs


def idefics3(rows: int, kind: Any = Idefics3ForConditionalGeneration) -> Any:
    config_class = Idefics3Config if kind is Idefics3ForConditionalGeneration else SmolVLMConfig
    text = {"model_type": "llama", **TEXT}
    config = config_class(
        text_config=text, vision_config=VISION, scale_factor=2, image_token_id=IMAGE, **UNTIED
    )
    return kind(config), {"input_ids": prompts(rows, 1), "pixel_values": pixels(rows, 1, 3, 8, 8)}


def smolvlm(rows: int) -> tuple[PreTrainedModel, Inputs]:
    return idefics3(rows, SmolVLMForConditionalGeneration)


def internvl(rows: int) -> tuple[PreTrainedModel, Inputs]:
    config = InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT},
        vision_config={**VISION, "image_size": [8, 8], "patch_size": [4, 4]},
        image_token_id=IMAGE,
        image_seq_length=1,
        **UNTIED,
    )
    inputs = {"input_ids": prompts(rows, 1), "pixel_values": pixels(rows, 3, 8, 8)}
    return InternVLForConditionalGeneration(config), inputs


def mllama(rows: int) -> tuple[PreTrainedModel, Inputs]:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = MllamaConfig(
        text_config={
            **TEXT,
            "num_hidden_layers": 4,
            "cross_attention_layers": [1, 3],
            "rope_parameters": rope,
            "tie_word_embeddings": False,
        },
        vision_config={
            **VISION,
            "num_global_layers": 1,
            "attention_heads": 4,
            "max_num_tiles": 2,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 64,
            "supported_aspect_ratios": [[1, 1], [1, 2]],
        },
        image_token_index=IMAGE,
    )
    ids = prompts(rows, 1)
    inputs = {"input_ids": ids, "pixel_values": pixels(rows, 1, 2, 3, 8, 8)}
    inputs["aspect_ratio_ids"] = torch.full((rows, 1), 2)
    inputs["aspect_ratio_mask"] = torch.ones((rows, 1, 2), dtype=torch.int64)
    mask = torch.ones((rows, ids.shape[1], 1, 2), dtype=torch.int64)
    mask[:, :3] = 0  # before the image
    inputs["cross_attention_mask"] = mask
    return MllamaForConditionalGeneration(config), inputs


def idefics(rows: int) -> tuple[PreTrainedModel, Inputs]:
    config = IdeficsConfig(
        **TEXT,
        additional_vocab_size=2,
        cross_layer_interval=1,
        alpha_initializer="ones",
        vision_config={**VISION, "embed_dim": 32},
    )
    ids = prompts(rows, 1)
    inputs = {"input_ids": ids, "pixel_values": pixels(rows, 1, 3, 8, 8)}
    inputs["image_attention_mask"] = torch.ones((rows, ids.shape[1], 1), dtype=torch.int64)
    inputs["image_attention_mask"][:, :3] = 0
    return IdeficsForVisionText2Text(config), inputs


TREES: list[Callable[[int], tuple[PreTrainedModel, Inputs]]] = [
    llava,
    qwen2_vl,
    qwen2_5_vl,
    qwen3_vl,
    idefics2,
    idefics3,
    smolvlm,
    internvl,
]
CHAINS = [gemma3]  # a sliding window
# Its layers cache the image; needs an image in every pass.
PLAIN = [mllama, idefics]
# transformers 5.17 gives its output the type of its prompt.
(TREES if transformers.__version__.startswith("5.23.") else PLAIN).append(paligemma)


@cache
def built(family: Any, rows: int) -> tuple[PreTrainedModel, Inputs, torch.Tensor]:
    """A random model, a prompt with an image for each row, and what plain decoding makes of it.

    Weights are large so that attention, and the image, matter."""
    torch.manual_seed(0)
    model, inputs = family(rows)
    for parameter in model.eval().parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
        else:  # a norm, a bias; a gate at zero would hide the image
            parameter.data += 0.7 if parameter.numel() == 1 else 0.1 * torch.randn_like(parameter)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return model, inputs, model.generate(**inputs, **OPTIONS)


@pytest.mark.parametrize("family", [*TREES, *CHAINS], ids=lambda each: each.__name__)
def test_a_text_about_an_image_equals_plain_decoding(family):
    model, inputs, plain = built(family, 1)
    other = {**inputs, "pixel_values": 3 * inputs["pixel_values"] + 1}
    assert model.generate(**other, **OPTIONS).tolist() != plain.tolist()
    for accuracy in (1.0, 0.7, 0.0):
        drafter = Prophet(plain, accuracy)
        options = {**OPTIONS, "candidate_generator": drafter, "max_draft_tokens": 8}
        assert model.generate(**inputs, **options).tolist() == plain.tolist()
        assert drafter.stats.drafted > 0
        assert drafter.stats.mat > 3 or accuracy < 1.0
    options |= {"candidate_generator": rs.ReferenceCopy() | rs.TokenRecycling()}
    assert model.generate(**inputs, **options).tolist() == plain.tolist()


@pytest.mark.parametrize("family", [*TREES, *CHAINS], ids=lambda each: each.__name__)
def test_texts_about_several_images_equal_plain_decoding(family):
    model, inputs, plain = built(family, 2)
    drafter = Prophets(inputs, plain, [0.9, 0.5])
    options = {**OPTIONS, "candidate_generator": drafter, "max_draft_tokens": 8}
    assert model.generate(**inputs, **options).tolist() == plain.tolist()
    assert (drafter.stats.mat > 1.5) == (family in TREES)


@pytest.mark.parametrize("family", CHAINS, ids=lambda each: each.__name__)
def test_the_cache_goes_on_with_its_image(family):
    model, inputs, plain = built(family, 1)
    texts = []
    for options in ({}, {"candidate_generator": Prophet(plain, 0.7), "max_draft_tokens": 8}):
        recorded = {**OPTIONS, "max_new_tokens": 20, "return_dict_in_generate": True}
        output = model.generate(**inputs, **recorded, **options)
        kwargs = {"past_key_values": output.past_key_values, **OPTIONS}
        texts.append(model.generate(output.sequences, **kwargs).tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("family", PLAIN, ids=lambda each: each.__name__)
def test_is_decoded_plainly_where_the_probe_cannot_ask(family, caplog):
    model, inputs, plain = built(family, 1)
    drafter = Prophet(plain, 1.0)
    assert model.generate(**inputs, **OPTIONS, candidate_generator=drafter).tolist() == (
        plain.tolist()
    )
    assert drafter.stats.drafted == 0
    assert "decoding plainly" in caplog.text


@pytest.mark.parametrize("family", [paligemma, gemma3])
def test_images_may_be_marked_by_an_id_outside_of_the_vocabulary(family, monkeypatch):
    monkeypatch.setitem(globals(), "IMAGE", VOCAB_SIZE + 1)
    model, inputs = family(1)
    plain = model.eval().generate(**inputs, **OPTIONS)
    drafter = rs.ReferenceCopy() | rs.RetrievalCache() | rs.TokenRecycling()
    for _ in range(2):  # the second call remembers the first
        ids = model.generate(**inputs, **OPTIONS, candidate_generator=drafter)
        assert ids.tolist() == plain.tolist()
