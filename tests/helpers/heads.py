"""Tiny random models with what drafts from their hidden states: layers for multi-token prediction,
an assistant that shares keys, a block drafter."""

import copy
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    PreTrainedModel,
)
from transformers.generation import CandidateGenerator
from transformers.modeling_layers import MtpModel

from tests.helpers.architectures import small, tiny_config

# The types of transformers that configure such layers, and one that does not; Mellum has one layer.
MTP_TYPES = [
    model_type
    for model_type in (
        *("bailing_hybrid", "deepseek_v3", "glm4_moe", "inkling_mm_model", "inkling_text"),
        *("kimi_k25", "llama", "mellum", "sarvam_mla", "sarvam_moe", "step3p7"),
    )
    if model_type in CONFIG_MAPPING  # of the installed version
]


class ReadsStates(CandidateGenerator):
    """A generator that asks for the hidden states of each pass."""

    requires_model_outputs = True
    model_kwargs_overrides = MappingProxyType({"output_hidden_states": True})


def with_mtp(
    model: PreTrainedModel, layers: int, folder: Path, text: torch.Tensor | None = None
) -> PreTrainedModel:
    """A copy of a model with layers for multi-token prediction, saved in a folder, from which
    `generate(use_mtp=True)` loads them: random ones, or such as have learned a text `(1, n)`."""
    model = copy.deepcopy(model)
    config = model.config.get_text_config()
    config.num_mtp_layers = layers
    for name in ("layer_types", "mlp_layer_types"):
        derived = isinstance(getattr(type(config), f"mtp_{name}", None), property)
        if getattr(config, name, None) is not None and not derived:
            setattr(config, f"mtp_{name}", getattr(config, name)[-1:] * layers)
    torch.manual_seed(0)
    head = MtpModel(model, layers)
    initialise = model.get_decoder()._init_weights  # `MtpModel`'s leaves routers and experts unset
    head.layers.apply(initialise)
    if text is not None:
        _learn(model, head, text)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    count = config.num_hidden_layers
    for name, weight in head.layers.state_dict().items():
        layer, rest = name.split(".", 1)
        name = f"model.layers.{count + int(layer)}.{rest.removeprefix('mtp_block.')}"
        weights[name] = weight.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model._keys_to_ignore_on_load_unexpected = [
        rf"model\.layers\.{count + layer}\." for layer in range(layers)
    ]
    model.config.name_or_path = str(folder)
    model.config.dtype = model.dtype  # which saving writes as its name
    return model.eval()


def _learn(model: PreTrainedModel, head: MtpModel, text: torch.Tensor) -> None:
    with torch.no_grad():
        states = model(text, output_hidden_states=True).hidden_states[-1]
    learning = [*head.layers.parameters()]
    optimizer = torch.optim.AdamW(learning, lr=3e-3)
    for _ in range(150):
        drafted, ids, loss = states, text, 0.0
        for layer in range(len(head.layers)):
            ids = ids[:, 1:]
            positions = torch.arange(layer + 1, layer + 1 + ids.shape[1])[None]
            drafted = drafted[:, : ids.shape[1]]
            drafted = head.forward_layer(layer, drafted, positions, None, input_ids=ids)
            logits = head.shared_head(drafted[0, :-1])
            loss = loss + torch.nn.functional.cross_entropy(logits, ids[0, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.zero_grad()


def gemma_with_assistant(sharing: int = 2) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A Gemma 4 whose last layers share keys, and an assistant that reads the same ones."""
    kinds = ["sliding_attention", "full_attention"]
    sizes = {"num_hidden_layers": 4, "layer_types": kinds * 2, "num_kv_shared_layers": sharing}
    target = small("gemma4_text", **sizes)
    text_config = copy.deepcopy(target.config)
    text_config.update({"num_hidden_layers": 2, "layer_types": kinds, "num_kv_shared_layers": 2})
    text_config.update({"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0})
    text_config.update({"use_double_wide_mlp": False, "enable_moe_block": False})
    config = Gemma4AssistantConfig(
        text_config=text_config, backbone_hidden_size=target.config.hidden_size
    )
    torch.manual_seed(1)
    assistant = Gemma4AssistantForCausalLM(config).eval()
    assistant.generation_config.num_assistant_tokens = 3
    return target, assistant


def block_drafter(model: PreTrainedModel) -> PreTrainedModel:
    """A random DFlash assistant for a model, which drafts three tokens."""
    config = tiny_config(
        MuseGlimmerAssistantConfig,
        {
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size": model.config.hidden_size,
            "target_layer_ids": [0, 1],
            "block_size": 4,
            "mask_token_id": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    torch.manual_seed(1)
    return MuseGlimmerAssistantModel(config).eval()
