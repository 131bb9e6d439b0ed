"""Every name of transformers that is private, or that differs between the supported versions.

No other file mentions one, so that a new release is compared with this file alone.
`version.py` holds the range of releases. `import hf_refspec` must not load this file, because
transformers takes seconds to import.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import signature
from typing import Any, TypeAlias

import torch
from transformers import (
    Cache,
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.generation import GenerateDecoderOnlyOutput

from .version import untested_transformers

try:
    from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin
    from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ImportError as error:
    raise ImportError(untested_transformers() or str(error)) from error

# Arguments that `generate` drops on its way to a callable.
DROPPED_ARGUMENTS = ("streamer", "synced_gpus", "tokenizer")
# The names under which models take and return their cache: "cache" for all models from 5.24 on,
# before that "cache_params" for Mamba and "past_key_values" for the others.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# The name that most models and the outputs of `generate` use in the installed version.
CACHE_NAME = next(
    name
    for name in CACHE_NAMES
    if name in {field.name for field in fields(GenerateDecoderOnlyOutput)}
)
# The attribute by which transformers remembers that a model has hooks for hidden states.
HAS_CAPTURING_HOOKS = "_output_capturing_hooks_installed"
# The argument that asks for the keys and values that a model shares between layers.
SHARED_KV = "return_shared_kv_states"
# Arguments of a forward pass over text; the last two ask for more than logits, and change none.
USUAL_ARGUMENTS = {
    *("attention_mask", "cache_position", "logits_to_keep", "position_ids", "use_cache"),
    *(*CACHE_NAMES, "output_hidden_states", SHARED_KV),
}
# Arguments that only prefills have.
PREFILL_ARGUMENTS = frozenset(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)
# A layer of a cache that holds the last tokens of a text, and one that holds a running state.
SlidingLayer = DynamicSlidingWindowLayer
RunningStateLayer = LinearAttentionCacheLayerMixin

# Returns the scores `(1, tokens)` of a place after a text, by the logits there.
Choose: TypeAlias = Callable[[int, torch.Tensor], torch.Tensor]

_GENERATION = "transformers.generation.utils"
# Methods of generation that this package replaces, and those that it calls for several tokens.
_LOOP = ("_sample", "_has_unfinished_sequences")
_STEPS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")


def cache_name(values: Mapping[str, Any]) -> str:
    """The name under which these arguments or outputs hold their cache."""
    return next((name for name in CACHE_NAMES if values.get(name) is not None), CACHE_NAME)


def belongs_to_caller(cache: Any) -> bool:
    """True if a cache was passed to `generate`, whose caller may use it afterwards."""
    return bool(getattr(cache, "_is_user_defined", False))


def decoder_output(
    sequences: torch.Tensor,
    cache: Cache | None,
    scores: tuple[torch.Tensor, ...] | None = None,
    logits: tuple[torch.Tensor, ...] | None = None,
) -> GenerateDecoderOnlyOutput:
    """The output of `generate` where the call asks for a dictionary."""
    output: dict[str, Any] = {"sequences": sequences, "scores": scores, "logits": logits}
    return GenerateDecoderOnlyOutput(**output, **{CACHE_NAME: cache})


def transformers_loop(model: PreTrainedModel, input_ids: torch.Tensor, **arguments: Any) -> Any:
    """The decoding loop of transformers, with the arguments that `generate` gives a callable."""
    return type(model)._sample(model, input_ids, **arguments)


def prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> Any:
    """The outputs of the first forward pass, as `generate` runs it over prompts `(R, n)`."""
    return model._prefill(input_ids, generation_config, model_kwargs)


def next_kwargs(
    model: PreTrainedModel,
    outputs: Mapping[str, Any],
    model_kwargs: dict[str, Any],
    new_tokens: int = 1,
) -> dict[str, Any]:
    """The keyword arguments after a forward pass, for this many tokens more."""
    return model._update_model_kwargs_for_generation(
        outputs,
        model_kwargs,
        is_encoder_decoder=model.config.is_encoder_decoder,
        num_new_tokens=new_tokens,
    )


def takes_usual_steps(model: PreTrainedModel) -> bool:
    """True if the model prepares the arguments of its steps and takes a cache, as most do."""
    if not any(name in signature(model.forward).parameters for name in CACHE_NAMES):
        return False
    methods = ((getattr(model, name), getattr(GenerationMixin, name)) for name in _STEPS)
    return all(getattr(method, "__func__", None) is usual for method, usual in methods)


def foreign_loop(model: PreTrainedModel) -> str | None:
    """A method of the decoding loop that is the model's or another library's own."""
    holders = (type(model), model)
    pairs = zip(_LOOP, holders, strict=True)
    return next((n for n, holder in pairs if _module_of(getattr(holder, n)) != _GENERATION), None)


def foreign_step(model: PreTrainedModel) -> str | None:
    """A method that prepares the arguments of a step and that transformers does not know."""
    names = (n for n in _STEPS if not _module_of(getattr(model, n)).startswith("transformers."))
    return next(names, None)


def _module_of(method: Any) -> str:
    """The module that a function comes from: wrappers copy `__module__`, but not its globals."""
    return getattr(method, "__globals__", {}).get("__name__", "")


def compiles_passes(
    model: PreTrainedModel, model_kwargs: dict[str, Any], generation_config: GenerationConfig
) -> bool:
    """True if `generate` would compile the forward passes of this call."""
    return bool(model._valid_auto_compile_criteria(model_kwargs, generation_config))


def is_compiled(model: PreTrainedModel) -> bool:
    """True if `torch.compile` was given the model, its forward pass or some module in it."""
    return any(
        module._compiled_call_impl is not None
        or (
            hasattr(module.forward, "_torchdynamo_orig_callable")
            and not hasattr(module.forward, "_torchdynamo_disable")
        )
        for module in model.modules()
    )


def keeps_state_in_modules(model: PreTrainedModel) -> bool:
    """True if the model says that it holds a running state."""
    return bool(model._is_stateful)


def attention_implementation(model: PreTrainedModel) -> str | None:
    """The name of the model's attention, as "sdpa"; `None` where its configuration has none."""
    return getattr(model.config, "_attn_implementation", None)


def attention_functions(model: PreTrainedModel) -> list[Any]:
    """The functions by which layers attend and make masks, if the configuration names some."""
    name = attention_implementation(model)
    interfaces = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    functions = [interface[name] for interface in interfaces if name in interface]
    eager = getattr(sys.modules[type(model).__module__], "eager_attention_forward", None)
    return [*functions, *([] if eager is None else [eager])]


def is_quantised(model: Any) -> bool:
    """True if transformers has loaded a model with a library that quantises its weights."""
    return getattr(model, "hf_quantizer", None) is not None


def experts_implementation(config: Any) -> str | None:
    """The implementation of a mixture's experts; `None` where the configuration names none."""
    return getattr(config, "_experts_implementation", None)


def supports_logits_to_keep(model: PreTrainedModel) -> bool:
    """True if a forward pass takes `logits_to_keep`."""
    return bool(model._supports_logits_to_keep())


def device_mesh(model: PreTrainedModel) -> Any:
    """The mesh of processes that tensor parallelism has split a model over; `None` for one."""
    return model._device_mesh if (getattr(model, "_tp_size", None) or 1) > 1 else None


def is_pipeline_stage(model: PreTrainedModel) -> bool:
    """True if pipeline parallelism has left this process with some of the layers."""
    return getattr(model, "_pp_stage", None) is not None


def is_synced(model: PreTrainedModel, synced_gpus: bool | None) -> bool:
    """True if `generate` keeps processes in step; transformers decides if it is `None`."""
    named = model._extract_generation_mode_kwargs(None, {}, synced_gpus, None, None)
    return bool(named["synced_gpus"])


def any_rank_unfinished(model: PreTrainedModel, ended: bool, device: torch.device) -> bool:
    """Tells all processes in step whether this one has ended; returns True if some has not."""
    return bool(model._has_unfinished_sequences(ended, True, device))


def ends_and_padding(config: GenerationConfig) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The end-of-text tokens and the padding token of a call, as `generate` has prepared them."""
    return config._eos_token_tensor, config._pad_token_tensor


def mask_length(config: GenerationConfig) -> int:
    """The length of a prompt with what its cache holds already, where the call has no mask."""
    return config._mask_length


def prefix_constraint(processor: Any, row: int) -> tuple[Any, int]:
    """The user's function of a `PrefixConstrainedLogitsProcessor`, and the row's prompt number.

    From 5.24 on, sequences of one prompt share a number."""
    return processor._prefix_allowed_tokens_fn, row // processor._num_beams


def reading_arguments(
    assistant_model: PreTrainedModel | None, use_mtp: bool | None, speculation_type: str | None
) -> dict[str, Any]:
    """The arguments of `generate` by which it drafts from the target's hidden states, if any."""
    if use_mtp:
        return {"use_mtp": True}
    named = type(assistant_model).__name__
    if named.startswith(("Gemma4Assistant", "Gemma4UnifiedAssistant")):
        return {"assistant_model": assistant_model}
    if assistant_model is None or speculation_type != "dflash":
        return {}
    return {"assistant_model": assistant_model, "speculation_type": speculation_type}


def is_block_drafter(config: PretrainedConfig) -> bool:
    """True if a model drafts a block of tokens from the target's hidden states, as DFlash does."""
    return hasattr(config, "target_layer_ids")


def hidden_state_generator(
    model: PreTrainedModel, assistant_model: PreTrainedModel | None = None, **config: Any
) -> Any:
    """The greedy candidate generator for [`reading_arguments`], for texts of any length."""
    arguments = GenerationConfig(do_sample=False, max_length=sys.maxsize, **config)
    try:
        generator = model._get_candidate_generator(arguments, None, None, None, {}, assistant_model)
    except (AttributeError, ValueError) as error:
        named = "use_mtp=True" if assistant_model is None else "assistant_model"
        name = type(model).__name__
        raise ValueError(f"`{named}` does not fit a {name}; leave it out: {error}") from error
    if (layers := getattr(generator, "mtp_model", None)) is not None:
        # They share the model's, and run ahead: dynamic frequencies would change in the model too.
        layers.rotary_emb = copy.deepcopy(layers.rotary_emb)
        if layers.layers[0].eh_proj.weight.dtype != model.dtype:  # cast since it was loaded
            layers.layers.to(model.dtype)
    if SHARED_KV in generator.model_kwargs_overrides:  # it reads the last layer's states alone
        generator.model_kwargs_overrides = {"output_hidden_states": -1, SHARED_KV: True}
    embeddings: Any = getattr(generator, "main_model_input_embeddings", None)
    if hasattr(embeddings, "embed_norm"):
        # DFlash would take the norm off the model's own, which other threads run meanwhile.
        generator.main_model_input_embeddings = own = copy.copy(embeddings)
        own._modules = {**own._modules, "embed_norm": torch.nn.Identity()}
    return generator


class _Choosing:
    """An assistant of one text, with the scores that a function returns in place of its logits."""

    def __init__(self, assistant: PreTrainedModel, choose: Choose) -> None:
        self.device = assistant.device
        self._assistant = assistant
        self._choose = choose
        self._place = 0

    def __call__(self, **inputs: Any) -> Any:
        outputs = self._assistant(**inputs)
        outputs.logits = self._choose(self._place, outputs.logits[:, -1])[:, None]
        self._place += 1
        return outputs


def choose_by(generator: Any, original: Any, choose: Choose | None, length: int) -> None:
    """Lets a copy of a generator draft, after a text of this length, what `choose` scores best."""
    if hasattr(generator, "logits_processor"):
        generator.do_sample = False
        generator.logits_processor = (
            None if choose is None else lambda ids, logits: choose(ids.shape[1] - length, logits)
        )
    elif SHARED_KV in original.model_kwargs_overrides and hasattr(original, "assistant_model"):
        assistant = original.assistant_model
        generator.assistant_model = _Choosing(assistant, choose) if choose else assistant


def mtp_layers(generator: Any) -> int:
    """The layers for multi-token prediction of a candidate generator; 0 for any other."""
    return getattr(generator, "num_mtp_layers", 0)


def forget_columns(generator: Any, count: int) -> None:
    """Lets a generator with [`mtp_layers`] read the last hidden states again."""
    if mtp_layers(generator):  # after the first they have read drafts, which may be rejected
        generator.mtp_cache.crop(-count)
    if count:  # it keeps the states of the whole text, for the same
        generator.full_seq_last_hidden_states = generator.full_seq_last_hidden_states[:, :0]


def shared_layers(model: PreTrainedModel) -> dict[str, int]:
    """By their type the layers whose keys and values a model shares with others (Gemma 4)."""
    return {
        module.layer_type: module.layer_idx
        for module in model.modules()
        if getattr(module, "store_full_length_kv", False)
    }
