"""Tiny random models with a tokenizer, a datastore and drafters, and what users do to a model
between two calls."""

import atexit
import copy
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizerFast
from transformers.cache_utils import Cache
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_refspec as rs
from hf_refspec.store.datastore import Datastore
from tests.helpers.architectures import ARCHITECTURES, MODEL_TYPES, VOCAB_SIZE, small
from tests.helpers.byte_model import byte_tokenizer
from tests.helpers.drafters import Noise, Prophet
from tests.helpers.heads import MTP_TYPES, block_drafter, gemma_with_assistant, with_mtp

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
    "opt": {"max_position_embeddings": 48},
    "llama": {"max_position_embeddings": 24, "rope_parameters": _DYNAMIC},
    "phi3": {"original_max_position_embeddings": 32, "rope_parameters": _LONGROPE},
    "mistral": {"sliding_window": 9},
    "gemma2": {"sliding_window": 9},
}
# The first pass of a big_bird makes its attention layers anew, which draws random numbers.
_TYPES = [name for name in MODEL_TYPES if name != "big_bird"]
_COMMON = [each.model_type for each in ARCHITECTURES]


@dataclass
class Last:
    """What a call has left: its cache, all of its ids, which the cache holds but for the last one,
    and the mask of its prompt."""

    cache: Cache
    ids: torch.Tensor
    mask: torch.Tensor | None


@dataclass
class Side:
    """One of two copies of a model, decoded plainly or with drafts: the model as the changes have
    left it, the arguments by which transformers drafts from its hidden states, its hooks, what the
    last call has left, and the drafters that learn from call to call."""

    model: Any
    reading: dict[str, Any] = field(default_factory=dict)
    hooks: list[Any] = field(default_factory=list)
    last: Last | None = None
    drafters: dict[str, Any] = field(default_factory=dict)

    @property
    def inner(self) -> PreTrainedModel:
        """The model of transformers inside what wraps it."""
        return next(each for each in self.model.modules() if isinstance(each, GenerationMixin))


Builder = Callable[[], Side]


def draw_model(rng: random.Random) -> tuple[str, Builder]:
    """A type of model, and what builds it: the same at each call."""
    where = rng.random()
    if where < 0.03:
        name = rng.choice(_COMMON)
        return f"{name}, its own inputs", lambda: Side(_with_own_inputs(small(name)))
    if where < 0.2:
        name = rng.choice(_TYPES)
        with suppress(Exception):  # whatever transformers raises where it cannot be built like that
            small(name)
            return name, lambda: Side(small(name))
    name = rng.choice(_COMMON)
    if where > 0.9:
        kind, layers = rng.choice([*_ASSISTED, *MTP_TYPES]), rng.choice([1, 1, 2])
        layers = 1 if kind == "mellum" else layers  # it has one at most
        return f"{kind}, its hidden states", lambda: _with_heads(kind, layers)
    config = _DROPOUT if rng.random() < 0.3 else {}
    if where < 0.4:
        name = rng.choice(list(_SHORT))
        config = config | _SHORT[name]
    dtype = rng.choice([torch.float32] * 9 + [torch.float64, torch.bfloat16, torch.float16])
    return name, lambda: Side(small(name, dtype, **config))


_ASSISTED = ["gemma4_text", "qwen3", "mistral"]


def _with_heads(kind: str, layers: int) -> Side:
    """A model with layers for multi-token prediction, or with an assistant."""
    if kind == "gemma4_text":
        model, assistant = gemma_with_assistant()
        return Side(model, {"assistant_model": assistant})
    if kind in _ASSISTED:
        model = small(kind)
        arguments = {"assistant_model": block_drafter(model), "speculation_type": "dflash"}
        return Side(model, arguments)
    return Side(copy.deepcopy(_with_layers(kind, layers)), {"use_mtp": True})


@cache
def _with_layers(kind: str, layers: int) -> PreTrainedModel:
    return with_mtp(small(kind), layers, Path(_folder()))


def _with_own_inputs(model: PreTrainedModel) -> PreTrainedModel:
    """Gives a model a class of its own, whose single steps see another token than was chosen."""

    def prepared(self, input_ids, **kwargs):
        inputs = super(type(self), self).prepare_inputs_for_generation(input_ids, **kwargs)
        if inputs["input_ids"].shape[1] == 1:
            inputs["input_ids"] = (inputs["input_ids"] + 1) % VOCAB_SIZE
        return inputs

    names = {"prepare_inputs_for_generation": prepared}
    model.__class__ = type(type(model).__name__, (type(model),), names)
    return model


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(map(chr, range(33, 127)))


def _folder() -> str:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def store() -> Datastore:
    """A tiny one of random ids."""
    rng = random.Random(0)
    documents = [rng.choices(range(3, VOCAB_SIZE), k=200) for _ in range(20)]
    return Datastore.build(documents, tokenizer(), f"{_folder()}/store", num_proc=1, progress=False)


class KnowsPlain(Prophet):
    """Knows what plain decoding answered to each prompt."""

    def __init__(self, plain: Any, mask: torch.Tensor | None, accuracy: float) -> None:
        super().__init__(np.zeros(1), accuracy)
        self.plain, self.mask = plain, mask

    def begin(self, prompt_ids, vocab_size):
        ids, length = self.plain.ids, self.plain.prompt_length
        for row, prompt in enumerate([] if ids is None else ids[:, :length]):
            mask = None if self.mask is None else self.mask[row * len(self.mask) // len(ids)]
            kept = prompt if mask is None else prompt[mask > 0]
            if kept.tolist() == prompt_ids.tolist():
                self.target_ids = np.concatenate([prompt_ids, ids[row, length:].numpy()])
        super().begin(prompt_ids, vocab_size)


def drafter_of(side: Side, call: Any, plain: Any) -> Any:
    """A drafter; those that learn are the same from call to call."""
    name = call.drafter
    if name == "auto":
        return name
    if name == "noise":
        return Noise()
    if name == "prophet":
        mask = call.mask if call.goes_on is None else None
        return KnowsPlain(plain, mask, random.Random(call.seed).choice([0.3, 0.9, 1.0]))
    if name == "lookup":
        return PromptLookupCandidateGenerator(num_output_tokens=8, max_length=10**6)
    if name not in side.drafters:
        made = {
            "copy": rs.ReferenceCopy,
            "recycling": rs.TokenRecycling,
            "store": lambda: rs.DatastoreDrafts(store()),
            "sessions": rs.SessionDrafts,
            "blend": lambda: rs.ReferenceCopy() | rs.TokenRecycling() | rs.SessionDrafts(),
            "model": lambda: rs.ReferenceCopy() | rs.DraftModel(small("llama")),
        }
        side.drafters[name] = made[name]()
    return side.drafters[name]


# Changes. Each is made to both sides with the same random numbers.


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


def weights(side: Side, rng: random.Random) -> None:
    parameter = rng.choice([each for each in side.model.parameters() if each.ndim > 1])
    parameter.data.copy_(parameter.data.flip(0))


def swap(side: Side, rng: random.Random) -> None:
    parent, name, old = _linear(side, rng)
    torch.manual_seed(rng.getrandbits(32))
    new = nn.Linear(old.in_features, old.out_features, old.bias is not None)
    setattr(parent, name, new.to(old.weight))


def quantize(side: Side, rng: random.Random) -> None:
    """To int8: the activations too, or the weights alone, by torchao where it is installed."""
    side.reading = {}  # layers are loaded as they were
    if rng.random() < 0.5:
        torch.ao.quantization.quantize_dynamic(side.model, {nn.Linear}, torch.qint8, inplace=True)
        return
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(side.model, Int8WeightOnlyConfig())


def attention(side: Side, rng: random.Random) -> None:
    side.inner.set_attn_implementation(rng.choice(["eager", "sdpa"]))


def adapter(side: Side, rng: random.Random) -> None:
    """Adds one, or disables, enables, merges or unmerges the one that is there."""
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


def dtype(side: Side, rng: random.Random) -> None:
    side.model.to(rng.choice([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    side.last, side.reading = None, {}


_GENERATION: list[tuple[str, Any]] = [("repetition_penalty", 1.3), ("eos_token_id", [2, 5, 9, 17])]
_GENERATION += [("use_cache", False), ("max_new_tokens", 9), ("return_dict_in_generate", True)]
_GENERATION += [("output_hidden_states", True), ("cache_implementation", "static")]
_GENERATION += [("temperature", 0.7)]


def generation_config(side: Side, rng: random.Random) -> None:
    name, value = rng.choice(_GENERATION)
    setattr(side.inner.generation_config, name, value)


def checkpointing(side: Side, rng: random.Random) -> None:
    side.inner.gradient_checkpointing_enable()
    side.model.train()


def copied(side: Side, rng: random.Random) -> None:
    side.model, side.hooks = copy.deepcopy(side.model), []


# By name, each with its weight.
_CHANGES: dict[str, tuple[float, Callable[[Side, random.Random], Any]]] = {
    "hook": (4, hook),
    "unhook": (3, unhook),
    "train": (2, lambda side, rng: side.model.train()),
    "train part": (1, lambda side, rng: rng.choice(list(side.model.modules())).train()),
    "evaluate": (2, lambda side, rng: side.model.eval()),
    "weights": (2, weights),
    "swap": (2, swap),
    "attention": (2, attention),
    "quantize": (2, quantize),
    "adapter": (3, adapter),
    "offload": (1, offload),
    "compiled": (0.15, compiled),
    "threads": (1, lambda side, rng: torch.set_num_threads(rng.choice([1, 2, 3]))),
    "dtype": (1.5, dtype),
    "generation config": (2, generation_config),
    "checkpointing": (1, checkpointing),
    "copied": (1, copied),
}
# What reads or replaces weights, which are elsewhere once they are offloaded.
_NEED_WEIGHTS = ("weights", "swap", "quantize", "adapter", "offload", "dtype", "copied")


def draw_change(rng: random.Random) -> str:
    [change] = rng.choices(list(_CHANGES), [weight for weight, _ in _CHANGES.values()])
    return change


def change_error(change: str, side: Side, seed: int) -> Exception | None:
    """Makes a change; returns what it raised if it suits neither the model nor this machine."""
    state = torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if change in _NEED_WEIGHTS and any(each.is_meta for each in side.model.parameters()):
                raise ValueError("the weights are offloaded")
            _CHANGES[change][1](side, random.Random(seed))
    except Exception as error:
        return error
    finally:
        torch.set_rng_state(state)
    return None
