"""Tiny random models of every type in transformers' causal-LM mapping, with the verification that
each should get. They are built by looking at a type's configuration: what is a size there is made
small by its name.

Weights are large so that attention matters: a wrong mask or position then changes ids. Nothing is
left at a constant (a gate, a sink or a bias of zeros hides what depends on it). Windows and chunks
are short so that a text crosses them.
"""

import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB_SIZE = 97
WINDOW = 16

_DEPTH = r"(num_|n_)?(hidden_|decoder_|encoder_)?layers?|num_(en|de)coder_layers|num_blocks|depth"
# The first pattern that matches the whole name of an integer tells its value; `None` leaves it.
_SIZES: list[tuple[str, int | None]] = [
    (r"type_vocab_size|qk_head_dim|chunk_size_\w+|num_layers_per_stack", None),
    (r"\w*vocab_size(_\w+)?", VOCAB_SIZE),
    (r"num_kv_shared_layers|num_nextn_predict_layers", 0),
    (r"(\w+_)?(window(_size|_len)?|chunk_size|chunk_length)|local_attention|index_topk", WINDOW),
    (r"(index_)?block_size|max_inference_chunksize", WINDOW // 2),
    (r"index_topk_blocks|topk_group", 1),
    (r"max_(position_embeddings|seq_len|target_positions)|n_positions|n_ctx|context_length", 512),
    (r"num_experts_per_tok(en)?|moe_(top)?k|top_k_experts|\w*n_?groups?|num_expert_group", 2),
    (r"(num_)?dense_layers", 2),
    (r"(\w+_)?experts", 4),
    # A small indexer's scores would tie at 0, and what a tie selects depends on the kernel.
    (r"index_n_heads", 128),
    (r"index_head_dim", 32),
    (r"mamba_(n|num)_heads|n_mamba_heads", 8),
    (r"(\w+_)?(key_value|kv|linear_num_key)_heads|num_query_groups", 2),
    (r"(\w+_)?(head_?dim|head_size|state_size|d_state|rank)|dim_head|d_head|mamba_d_head", 8),
    (r"rotary_dim|kv_channels|d_rel", 8),
    (r"(\w+_)?heads?", 4),
    (r"(\w+_)?(intermediate_size(_mlp)?|ffn_dim|ffn_hidden_size|feed_forward_size|inner)", 48),
    (r"dff|dim_ff", 48),
    (r"mamba_d_ssm|attention_hidden_size", 64),
    (r"(\w+_)?(hidden_size|embedding_size|embed_dim|emb_dim|embedding_dim)|d_model|n_embd", 32),
    (r"word_embed_proj_dim|lru_width|projection_dim", 32),
    (r"image_size", 8),
    (r"patch_size", 4),
    (r"temporal_patch_size", 1),
]
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}

# What a type needs besides: sizes that are None by default, kinds of layers that no list names.
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": VOCAB_SIZE},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _MROPE, "full_attention": _MROPE},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "hc_sinkhorn_iters": 4,
    },
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "dory": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "dots3_note": {"vision_config": {"adapter_in_dim": 32}},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 8,
        "swa_kv_lora_rank": 8,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "gemma3n_text": {"intermediate_size": 48},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"L_cycles": 1},
    "inkling_mm_model": {"vision_config": {"temporal_patch_size": 2}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    # The list of its layers with experts holds their numbers, so that no two seem alike.
    "llama4_text": {
        "num_hidden_layers": 2,
        "moe_layers": [1],
        "no_rope_layers": [1, 0],
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "mamba2": {"num_heads": 8},
    "mpt": {"use_cache": True},
    "nemotron": {"num_key_value_heads": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_shape": (16, 32), "axial_pos_embds_dim": (16, 16), "hash_seed": 0},
    "rwkv": {"attention_hidden_size": 32},
    "step3p7": {
        "text_config": {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        }
    },
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "qwen4_exp_text": {
        "indexer_n_heads": 128,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": WINDOW,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 1,
    },
}
_EXCEPTIONS |= {
    model_type: {"text_config": _EXCEPTIONS[f"{model_type}_text"]}
    for model_type in ("llama4", "qwen4_exp")
}

# How each type is verified with the text of the tests, as of transformers 5.24: all others by a
# tree. Texts of 52 tokens cross every window.
CHAIN = """
axk2 bailing_hybrid bamba bart bigbird_pegasus blenderbot blenderbot-small bloom deepseek_v32
deepseek_v4 dots3_note_text falcon_h1 glm_moe_dsa gpt_neo granitemoehybrid hy_v4
inkling2_loop_text inkling2_text inkling_text kimi_linear lara_mini lfm2 lfm2_moe lfm3 llama4
llama4_text mamba2 marian mbart moss_transcribe_diarize mpt mvp olmo_hybrid openai-gpt pegasus
plbart qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text
roformer trocr whisper zaya
""".split()  # noqa: SIM905
# For each type that decodes plainly the reason that the call gives, as docs/limits.md quotes it.
_OTHER_LOGITS = "several tokens in one pass have other logits than one after another"
_OWN_CACHE = "it keeps its cache in a form of its own"
_AT_A_LENGTH = "drafts were found inexact at the length of the text"
PLAIN = {
    "cpmant": _OTHER_LOGITS,  # attends in both directions
    "doge": _AT_A_LENGTH,  # past its window equal tokens tie, and the kernel chooses
    "falcon_mamba": _OTHER_LOGITS,  # several tokens restart the state
    "jamba": _OTHER_LOGITS,  # the same
    "mamba": _OTHER_LOGITS,  # the same
    "minimax": _OWN_CACHE,
    "nemotron_h": _OTHER_LOGITS,  # single steps have no least time step, which these weights pass
    "prophetnet": "only supported for `decoder_input_ids` of length 1",
    "recurrent_gemma": _OTHER_LOGITS,  # the state is in the modules
    "reformer": _OWN_CACHE,
    "rwkv": _OWN_CACHE,
    "xlm": "cuts the tokens of a pass, or adds others to them",  # a mask token
    "xlnet": _OWN_CACHE,
    "xlstm": _OWN_CACHE,
    "zamba": _OTHER_LOGITS,  # several tokens restart the state
    "zamba2": _OTHER_LOGITS,  # as Nemotron-H
}
# Types that cannot be built this small, or that transformers cannot decode plainly.
NOT_COMPARED = """
blt dots3_note gemma3n gemma4_assistant gemma4_unified_assistant musicgen musicgen_melody
""".split()  # noqa: SIM905
# Which of the trees cannot be batched.
ONE_ROW = {"git": "plain steps of padded rows differ from one pass"}


@dataclass(frozen=True)
class Architecture:
    """A model type of transformers."""

    model_type: str

    @property
    def verification(self) -> str:
        """How it is verified: "tree", "chain", or "none" where drafts cannot be verified."""
        if self.model_type in PLAIN:
            return "none"
        return "chain" if self.model_type in CHAIN else "tree"

    def __str__(self) -> str:
        return self.model_type


# Those that most tests run on, one of each kind: rotary and learned positions, experts, keys of
# another size than values, windows in all layers and in some, and running states, exact or not.
ARCHITECTURES = [
    Architecture(model_type)
    for model_type in (
        *("llama", "gpt2", "qwen3_moe", "deepseek_v3"),
        *("mistral", "gemma2", "qwen3_next", "mamba"),
    )
]


def small(model_type: str, dtype: torch.dtype = torch.float32, **config: Any) -> PreTrainedModel:
    """A random model of a type, with these values in its configuration; the same at each call.

    Raises:
        Exception: Whatever transformers raises where the type cannot be built like that.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = {**_EXCEPTIONS.get(model_type, {}), **config}
        tiny = tiny_config(CONFIG_MAPPING[model_type], values)
        torch.manual_seed(0)
        auto = AutoModelForCausalLM
        if type(tiny) not in MODEL_FOR_CAUSAL_LM_MAPPING:  # it reads images too
            auto = AutoModelForImageTextToText
        model = auto.from_config(tiny, dtype=dtype).eval()
    for parameter in model.parameters():
        if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def tiny_config(
    config_class: type[PreTrainedConfig], exceptions: dict[str, Any]
) -> PreTrainedConfig:
    """The configuration with small sizes, one layer of each kind (two at least), and the same for
    the configurations inside it; `exceptions` by name."""
    defaults = vars(config_class())
    depths = {n: v for n, v in defaults.items() if re.fullmatch(_DEPTH, n) and isinstance(v, int)}
    lists = _lists_of_layers(defaults, max(depths.values(), default=0))
    layers = _one_of_each_kind(lists)
    values: dict[str, Any] = {}
    for name, default in defaults.items():
        if isinstance(default, PreTrainedConfig):
            values[name] = tiny_config(type(default), exceptions.get(name, {}))
        elif name in exceptions or name.startswith("_"):
            continue
        elif name in depths:
            values[name] = len(layers)
        elif name in lists:
            values[name] = [default[layer] for layer in layers]
        elif type(default) is int:
            values |= _small(name, default)
        elif name in ("initializer_range", "init_std"):
            values[name] = 0.25
        elif name == "is_decoder":
            values[name] = True
        elif name == "head_dim" and default is None:
            values[name] = 8
    if "kv_lora_rank" in defaults and "num_key_value_heads" in defaults:
        values["num_key_value_heads"] = values["num_attention_heads"]
    if "tie_word_embeddings" in defaults:  # tied, a random model would repeat one token
        values["tie_word_embeddings"] = False
    if "vocab_size" in defaults:
        values |= _TOKENS
    others = {
        n: v for n, v in exceptions.items() if not isinstance(defaults.get(n), PreTrainedConfig)
    }
    return config_class(**values | others)


def _small(name: str, default: int) -> dict[str, int]:
    if default <= 0 or name.endswith("_id"):
        return {}
    sizes = (size for pattern, size in _SIZES if re.fullmatch(pattern, name))
    size = next(sizes, None)
    return {} if size is None else {name: size if name.startswith("index_") else min(size, default)}


def _lists_of_layers(values: dict[str, Any], depth: int) -> dict[str, Any]:
    """What the configuration says of each layer."""
    return {
        name: value
        for name, value in values.items()
        if depth > 2 and isinstance(value, (list, tuple)) and len(value) == depth
    }


def _one_of_each_kind(lists: dict[str, Any]) -> list[int]:
    """The first layer of each kind, in order; at least two layers."""
    first: dict[tuple[str, ...], int] = {}
    for layer, kind in enumerate(zip(*lists.values(), strict=True)):
        first.setdefault(tuple(map(str, kind)), layer)
    return sorted(first.values()) if len(first) > 1 else [0, 1]
