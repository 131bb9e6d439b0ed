"""Models and tokenizers of commands: what is refused, and where they are placed."""

import os
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, CLIPConfig, LlamaConfig, T5Config

from hf_refspec.apps.shared import loading as module
from hf_refspec.smollm2 import HUB_ID


@pytest.fixture
def default_folder(tmp_path, byte_llama, monkeypatch) -> Path:
    """A tiny model in place of the default one."""
    byte_llama.save_pretrained(tmp_path)
    monkeypatch.setattr(module, "default_model", lambda: str(tmp_path))
    return tmp_path


def test_damaged_weights_are_named_and_the_default_models_can_be_fetched_again(default_folder):
    os.truncate(default_folder / "model.safetensors", 1000)
    with pytest.raises(ValueError, match=rf"the model {default_folder} cannot be loaded: [^;]*$"):
        module.load_model(str(default_folder), device_map="cpu")
    with pytest.raises(
        ValueError, match=rf"{HUB_ID} cannot be loaded: .*; delete {default_folder}, so"
    ):
        module.load_model(device_map="cpu")


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (T5Config(), "T5Config"),
        (LlamaConfig(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClass"),
        (BertConfig(architectures=["BertForMaskedLM"]), "BertForMaskedLM"),
        (CLIPConfig(architectures=["CLIPModel"]), "CLIPModel"),
    ],
)
def test_what_is_no_language_model_is_refused(tmp_path, config, kind):
    config.save_pretrained(tmp_path / "other")
    for load in (module.load_model, module.load_config):
        with pytest.raises(ValueError, match=f"is not a decoder-only language model but a {kind}"):
            load(str(tmp_path / "other"))


@pytest.mark.parametrize("layers", ["cpu", "disk"])
def test_a_model_is_placed_in_parts(tmp_path, byte_llama, layers):
    byte_llama.save_pretrained(tmp_path)
    others = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    places = {**dict.fromkeys(others, "cpu"), "model.layers": layers}
    model = module.load_model(str(tmp_path), places)
    assert any(each.is_meta for each in model.parameters()) == (layers == "disk")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_named(default_folder):
    with pytest.raises(ValueError, match=f"{HUB_ID} cannot be loaded: .*(CUDA|NVIDIA)[^;]*$"):
        module.load_model(device_map="cuda")
