"""Texts about an image equal plain decoding's in float32, drafted where the probe allows it."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

import hf_refspec as rs
from tests.helpers.architectures import VOCAB_SIZE, tiny_config
from tests.helpers.calls import GREEDY, Call, assert_lossless

Inputs = dict[str, torch.Tensor]

IMAGE, VIDEO, VISION_START, VISION_END = 9, 8, 7, 6  # tokens
OPTIONS = {**GREEDY, "max_new_tokens": 40, "pad_token_id": 0}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
QWEN = {
    "text_config": {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}},
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
MARKS = {"boi_token_index": VISION_START, "eoi_token_index": VISION_END}
DEEPSTACK = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
RESAMPLED = {"perceiver_config": {"resampler_n_latents": 4, "resampler_depth": 1}}
CROSSING = {"num_hidden_layers": 4, "cross_attention_layers": [1, 3], "rope_parameters": ROPE}
TILED = {
    **{"max_num_tiles": 2, "supported_aspect_ratios": [[1, 1], [1, 2]]},
    **{"num_global_layers": 1, "intermediate_layers_indices": [0], "vision_output_dim": 64},
}
GATED = {"additional_vocab_size": 2, "cross_layer_interval": 1, "alpha_initializer": "ones"}
# By model type: the tokens of an image, the shape of a row's pixels, what its configuration needs
# beside small sizes.
FAMILIES: dict[str, tuple[int, tuple[int, ...], dict[str, Any]]] = {
    "llava": (4, (3, 8, 8), {}),
    "paligemma": (4, (3, 8, 8), {}),
    "gemma3": (4, (3, 8, 8), {**MARKS, "mm_tokens_per_image": 4}),
    "qwen2_vl": (4, (3 * 4 * 4,), QWEN),
    "qwen2_5_vl": (4, (3 * 4 * 4,), QWEN),
    "qwen3_vl": (4, (3 * 4 * 4,), {**QWEN, "vision_config": DEEPSTACK}),
    "idefics2": (4, (1, 3, 8, 8), {"text_config": {"sliding_window": None}, **RESAMPLED}),
    "idefics3": (1, (1, 3, 8, 8), {}),
    "smolvlm": (1, (1, 3, 8, 8), {}),
    "internvl": (1, (3, 8, 8), {"vision_config": {"image_size": [8, 8], "patch_size": [4, 4]}}),
    "mllama": (1, (1, 2, 3, 8, 8), {"text_config": CROSSING, "vision_config": TILED}),
    "idefics": (1, (1, 3, 8, 8), GATED),
}
# mllama's layers cache the image, and idefics needs an image in every pass.
PLAIN = ["mllama", "idefics"]
TREES = [family for family in FAMILIES if family not in PLAIN]


def build(family: str, rows: int, image: int = IMAGE) -> tuple[PreTrainedModel, Inputs]:
    """A random model, and a prompt for each row: three tokens, an image, eleven tokens."""
    image_tokens, shape, values = FAMILIES[family]
    ids = torch.randint(10, VOCAB_SIZE, (rows, 14), generator=torch.Generator().manual_seed(1))
    ids[:, 2] = VISION_START
    ids = torch.cat([ids[:, :3], torch.full((rows, image_tokens), image), ids[:, 3:]], dim=1)
    is_image = (ids == image).long()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family == "paligemma":
        inputs["token_type_ids"] = torch.zeros_like(ids)  # all of a prompt sees all of it
    elif family == "gemma3":
        inputs["token_type_ids"] = is_image
    elif family.startswith("qwen"):
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * rows)
        inputs["mm_token_type_ids"] = is_image
    elif family == "mllama":
        inputs["aspect_ratio_ids"] = torch.full((rows, 1), 2)
        inputs["aspect_ratio_mask"] = torch.ones((rows, 1, 2), dtype=torch.int64)
        inputs["cross_attention_mask"] = torch.ones((*ids.shape, 1, 2), dtype=torch.int64)
        inputs["cross_attention_mask"][:, :3] = 0  # before the image
    elif family == "idefics":
        inputs["image_attention_mask"] = torch.ones((*ids.shape, 1), dtype=torch.int64)
        inputs["image_attention_mask"][:, :3] = 0
    patches = 16 if family.startswith("qwen") else 1
    generator = torch.Generator().manual_seed(2)
    inputs["pixel_values"] = torch.randn((patches * rows, *shape), generator=generator)
    marks = {"image_token_id": image, "image_token_index": image}
    torch.manual_seed(0)
    config = tiny_config(CONFIG_MAPPING[family], {**marks, **values})
    return AutoModelForImageTextToText.from_config(config).eval(), inputs


@cache
def call_of(family: str, rows: int) -> Call:
    """A call about an image. Weights are large so that attention, and the image, matter."""
    model, inputs = build(family, rows)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
        else:  # a norm, a bias; a gate at zero would hide the image
            parameter.data += 0.7 if parameter.numel() == 1 else 0.1 * torch.randn_like(parameter)
    return Call(model, inputs=inputs, **OPTIONS)


@pytest.mark.parametrize("family", TREES)
def test_a_text_about_an_image_equals_plain_decoding(family):
    call = call_of(family, 1)
    other = 3 * call.inputs["pixel_values"] + 1
    assert call.generate(pixel_values=other).tolist() != call.plain.tolist()
    for accuracy in (1.0, 0.7, 0.0):
        stats = call.assert_lossless(accuracy)
        assert stats.drafted > 0
        assert stats.mat > 3 or accuracy < 1.0
    call.assert_lossless(rs.ReferenceCopy() | rs.TokenRecycling())


@pytest.mark.parametrize("family", TREES)
def test_texts_about_several_images_equal_plain_decoding(family):
    assert call_of(family, 2).assert_lossless([0.9, 0.5]).mat > 1.5


@pytest.mark.parametrize("family", ["gemma3"])  # a sliding window
def test_the_cache_goes_on_with_its_image(family):
    call, texts = call_of(family, 1), []
    for drafting in ({}, {"candidate_generator": call.drafter(0.7), "max_draft_tokens": 8}):
        output = call.generate(max_new_tokens=20, return_dict_in_generate=True, **drafting)
        cache = {"past_key_values": output.past_key_values}
        texts.append(call.model.generate(output.sequences, **cache, **OPTIONS).tolist())
    assert texts[0] == texts[1]


def test_mllama_without_an_image_is_drafted():
    call = call_of("mllama", 1)
    text = {name: call.inputs[name] for name in ("input_ids", "attention_mask")}
    assert assert_lossless(call.model, 1.0, text, **OPTIONS).mat > 3


@pytest.mark.parametrize("family", PLAIN)
def test_models_that_the_probe_cannot_ask_are_decoded_plainly(family, caplog):
    assert call_of(family, 1).assert_lossless(1.0).drafted == 0
    assert "decodes plainly" in caplog.text


@pytest.mark.parametrize("family", ["paligemma", "gemma3"])
def test_images_may_be_marked_by_an_id_outside_of_the_vocabulary(family):
    model, inputs = build(family, 1, image=VOCAB_SIZE + 1)
    call = Call(model, inputs=inputs, **OPTIONS)
    drafter = rs.ReferenceCopy() | rs.SessionDrafts() | rs.TokenRecycling()
    for _ in range(2):  # the second call remembers the first
        call.assert_lossless(drafter)
