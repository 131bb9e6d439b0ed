"""Tiny random models, and what users do to a model between two calls."""

from __future__ import annotations

import copy
import random
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from architecture_mapping import MODEL_TYPES, tiny_model
from architectures import ARCHITECTURES, VOCAB_SIZE, Architecture, build
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

_DROPOUT = dict.fromkeys(
    ("dropout", "attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop"),
    0.2,
)
_LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32},
    **{"short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
# Windows, tables of positions and lengths of rotary embeddings that short texts come to.
_SHORT = {
    "gpt2": {"n_positions": 48},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 48},
    "llama": {"max_position_embeddings": 24, "rope_parameters": _DYNAMIC},
    "phi3": {"original_max_position_embeddings": 32, "rope_parameters": _LONGROPE},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 9},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 9},
}
# Its first pass makes its attention layers anew, which draws random numbers.
_TYPES = [name for name in MODEL_TYPES if name != "big_bird"]


@dataclass
class Last:
    """What a call has left: its cache, all of its ids, which the cache holds but for the last one,
    and the mask of its prompt."""

    cache: Cache
    ids: torch.Tensor
    mask: torch.Tensor | None


@dataclass
class Side:
    """One of two copies of a model: it is decoded plainly or with drafts.

    Attributes:
        model (`nn.Module`): As the changes have left it.
        hooks (`list`): Of the model, which can be removed.
        last ([`Last`], *optional*): Of the last call, if it returned a cache.
        drafters (`dict[str, Any]`): Those that go on from call to call.
    """

    model: Any
    hooks: list[Any] = field(default_factory=list)
    last: Last | None = None
    drafters: dict[str, Any] = field(default_factory=dict)

    @property
    def inner(self) -> PreTrainedModel:
        """The model of transformers inside of what wraps it."""
        from transformers import GenerationMixin

        return next(each for each in self.model.modules() if isinstance(each, GenerationMixin))


def draw_model(rng: random.Random) -> tuple[str, Callable[[], PreTrainedModel]]:
    """A type of model, and what builds it: the same at each call."""
    where = rng.random()
    if where < 0.03:
        return _own_methods(rng.choice(ARCHITECTURES), rng.choice(list(_OWN)))
    if where < 0.2:
        name = rng.choice(_TYPES)
        with suppress(Exception):  # whatever transformers raises where it cannot be built like that
            tiny_model(name)
            return name, lambda: tiny_model(name)
    architecture = rng.choice(ARCHITECTURES)
    if where < 0.4:
        architecture = Architecture(name := rng.choice(list(_SHORT)), "", _SHORT[name])
    config = {**architecture.config, **(_DROPOUT if rng.random() < 0.3 else {})}
    changed = Architecture(architecture.model_type, "", config)
    dtype = rng.choice([torch.float32] * 9 + [torch.float64, torch.bfloat16, torch.float16])
    return architecture.model_type, lambda: build(changed, dtype)


def _sample(self, input_ids, **kwargs):
    """Decoding that is not GenerationMixin's: what it returns is something else."""
    output = super(type(self), self)._sample(input_ids, **kwargs)
    return output[:, ::2] if isinstance(output, torch.Tensor) else output


def _prepare_inputs_for_generation(self, input_ids, **kwargs):
    """Single steps see another token than the one that was chosen."""
    inputs = super(type(self), self).prepare_inputs_for_generation(input_ids, **kwargs)
    if inputs["input_ids"].shape[1] == 1:
        inputs["input_ids"] = (inputs["input_ids"] + 1) % VOCAB_SIZE
    return inputs


_OWN = {"_sample": _sample, "prepare_inputs_for_generation": _prepare_inputs_for_generation}


def _own_methods(
    architecture: Architecture, name: str
) -> tuple[str, Callable[[], PreTrainedModel]]:
    """A model of a class of its own, which overrides a method of generation."""

    def built() -> PreTrainedModel:
        model = build(architecture)
        model.__class__ = type(type(model).__name__, (type(model),), {name: _OWN[name]})
        return model

    return f"{architecture.model_type}, its own {name}", built


# Changes. Each is done to both sides with the same random numbers.


def _linear(side: Side, rng: random.Random) -> tuple[nn.Module, str, nn.Linear]:
    """The parent, the name in it, and a linear layer."""
    found = [
        (parent, name, child)
        for parent in side.model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]
    return rng.choice(found)


def hook(side: Side, rng: random.Random) -> None:
    """Steers a layer: at all tokens, at the last one, or in single steps."""
    layer, seed, kind = _linear(side, rng)[2], rng.getrandbits(32), rng.choice("als")

    def steer(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        vector = torch.randn(output.shape[-1], generator=generator).to(output)
        if kind == "s" and output.ndim == 3 and output.shape[1] > 1:
            return output
        if kind == "l" and output.ndim == 3:
            return torch.cat([output[:, :-1], output[:, -1:] + vector], dim=1)
        return output + vector

    side.hooks.append(layer.register_forward_hook(steer))


def unhook(side: Side, rng: random.Random) -> None:
    for each in side.hooks:
        each.remove()
    side.hooks.clear()


def train(side: Side, rng: random.Random) -> None:
    side.model.train()


def train_part(side: Side, rng: random.Random) -> None:
    rng.choice(list(side.model.modules())).train()


def evaluate(side: Side, rng: random.Random) -> None:
    side.model.eval()


def weights(side: Side, rng: random.Random) -> None:
    parameter = rng.choice([each for each in side.model.parameters() if each.ndim > 1])
    parameter.data.copy_(parameter.data.flip(0))


def swap(side: Side, rng: random.Random) -> None:
    parent, name, old = _linear(side, rng)
    torch.manual_seed(rng.getrandbits(32))
    new = nn.Linear(old.in_features, old.out_features, old.bias is not None)
    setattr(parent, name, new.to(old.weight))


def attention(side: Side, rng: random.Random) -> None:
    side.inner.set_attn_implementation(rng.choice(["eager", "sdpa"]))


def quantize(side: Side, rng: random.Random) -> None:
    torch.ao.quantization.quantize_dynamic(side.model, {nn.Linear}, torch.qint8, inplace=True)


def torchao_int8(side: Side, rng: random.Random) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # raises where it is missing

    quantize_(side.model, Int8WeightOnlyConfig())


def adapter(side: Side, rng: random.Random) -> None:
    """Adds one, or disables, enables, merges or unmerges the one that there is."""
    from peft import LoraConfig, PeftModel, get_peft_model

    if isinstance(side.model, PeftModel):
        todo = ["disable_adapter_layers", "enable_adapter_layers", "merge_adapter"]
        getattr(side.model, rng.choice([*todo, "unmerge_adapter"]))()
        return
    torch.manual_seed(rng.getrandbits(32))
    dropout = rng.choice([0.0, 0.2])
    config = LoraConfig(
        r=2, target_modules="all-linear", init_lora_weights=False, lora_dropout=dropout
    )
    if rng.random() < 0.5:
        side.model.add_adapter(config)
    else:
        side.model = get_peft_model(side.model, config, autocast_adapter_dtype=False)


def offload(side: Side, rng: random.Random) -> None:
    """Keeps the weights in memory or on disk, and loads each layer when it runs."""
    from accelerate import cpu_offload, disk_offload

    if rng.random() < 0.5:
        cpu_offload(side.model, execution_device="cpu")
    else:
        disk_offload(side.model, tempfile.mkdtemp(), execution_device="cpu")


def compiled(side: Side, rng: random.Random) -> None:
    if rng.random() < 0.5:
        side.model.compile(backend="eager")
    else:
        side.model.forward = torch.compile(side.model.forward, backend="eager")


def threads(side: Side, rng: random.Random) -> None:
    torch.set_num_threads(rng.choice([1, 2, 3]))


def dtype(side: Side, rng: random.Random) -> None:
    side.model.to(rng.choice([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    side.last = None


def generation_config(side: Side, rng: random.Random) -> None:
    name, value = rng.choice(
        [
            ("repetition_penalty", 1.3),
            ("eos_token_id", [2, 5, 9, 17]),
            ("use_cache", False),
            ("max_new_tokens", 9),
            ("return_dict_in_generate", True),
            ("output_hidden_states", True),
            ("cache_implementation", "static"),
            ("temperature", 0.7),
        ]
    )
    setattr(side.inner.generation_config, name, value)


def checkpointing(side: Side, rng: random.Random) -> None:
    side.inner.gradient_checkpointing_enable()
    side.model.train()


def copied(side: Side, rng: random.Random) -> None:
    side.model, side.hooks = copy.deepcopy(side.model), []


_CHANGES: dict[Callable[[Side, random.Random], None], float] = {
    hook: 4,
    unhook: 3,
    train: 2,
    train_part: 1,
    evaluate: 2,
    weights: 2,
    swap: 2,
    attention: 2,
    quantize: 1.5,
    torchao_int8: 0.5,
    adapter: 3,
    offload: 1,
    compiled: 0.15,
    threads: 1,
    dtype: 1.5,
    generation_config: 2,
    checkpointing: 1,
    copied: 1,
}


# What reads or replaces weights, which are elsewhere once they are offloaded.
_NEED_WEIGHTS = (weights, swap, quantize, torchao_int8, adapter, offload, dtype, copied)


def draw_change(rng: random.Random) -> Callable[[Side, random.Random], None]:
    [change] = rng.choices(list(_CHANGES), list(_CHANGES.values()))
    return change


def change_error(
    change: Callable[[Side, random.Random], None], side: Side, seed: int
) -> Exception | None:
    """Does a change; returns what it raised where it suits neither the model nor this machine."""
    state = torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if change in _NEED_WEIGHTS and any(each.is_meta for each in side.model.parameters()):
                raise ValueError("the weights are offloaded")
            change(side, random.Random(seed))
    except Exception as error:
        return error
    finally:
        torch.set_rng_state(state)
    return None
