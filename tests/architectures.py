"""Tiny random models of many architectures, with the verification that each should get.

`initializer_range` is large so that attention matters: a wrong mask or position then changes ids.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 97

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.25,
}
_GROUPED = {"num_key_value_heads": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Architecture:
    """A model type of transformers, what its tiny configuration needs, and how it is verified."""

    model_type: str
    verification: str  # "tree", "chain", or "none" where drafts cannot be verified
    config: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.model_type


def _tree(model_type: str, **config: Any) -> Architecture:
    return Architecture(model_type, "tree", config)


def _chain(model_type: str, **config: Any) -> Architecture:
    return Architecture(model_type, "chain", config)


def _plain(model_type: str, **config: Any) -> Architecture:
    return Architecture(model_type, "none", config)


ARCHITECTURES = [
    _tree("llama", **_GROUPED),
    _tree("qwen2", **_GROUPED),
    _tree("qwen3", **_GROUPED, head_dim=8),
    _tree("qwen3_moe", **_GROUPED, **_EXPERTS, num_experts=4, head_dim=8),
    _tree("mixtral", **_GROUPED, num_local_experts=4),
    _tree("phi", **_GROUPED),
    _tree("phi3", **_GROUPED),
    _tree("olmo2", **_GROUPED),
    _tree("cohere", **_GROUPED),
    _tree("granite", **_GROUPED),
    _tree("starcoder2", **_GROUPED, sliding_window=None),
    _tree("stablelm", **_GROUPED),
    _tree("gemma", **_GROUPED, head_dim=8),
    _tree("glm4", **_GROUPED, head_dim=8),
    _tree("smollm3", **_GROUPED),
    _tree("gpt_neox"),
    _tree("falcon", new_decoder_architecture=False, multi_query=True, alibi=False),
    _tree("opt", ffn_dim=48, word_embed_proj_dim=32),
    _tree("gpt2", n_positions=512),
    _tree("gpt_bigcode", n_positions=512),
    _tree("gptj", n_positions=512, rotary_dim=4),
    _tree("codegen", n_positions=512, rotary_dim=4),
    _tree("persimmon"),
    _tree("biogpt"),
    _tree("xglm", d_model=32, ffn_dim=48, num_layers=2, attention_heads=4),
    _tree(
        "deepseek_v3",
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
        **_EXPERTS,
    ),
    # Sliding windows
    _chain("mistral", **_GROUPED, sliding_window=16),
    _chain("gemma2", **_GROUPED, head_dim=8, sliding_window=16),
    _chain("gemma3_text", **_GROUPED, head_dim=8, sliding_window=16),
    _chain("cohere2", **_GROUPED, sliding_window=16),
    _chain("gpt_oss", **_GROUPED, head_dim=8, sliding_window=16, num_local_experts=4),
    # ALiBi: positions are where a token stands in the cache
    _chain("bloom", n_layer=2, n_head=4),
    _chain("mpt", use_cache=True, d_model=32, n_heads=4, n_layers=2, max_seq_len=512),
    # Running states
    _chain("mamba2", state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=8),
    _chain(
        "qwen3_next",
        **_GROUPED,
        **_EXPERTS,
        num_experts=4,
        head_dim=8,
        shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    _chain("lfm2", **_GROUPED, layer_types=["conv", "full_attention"]),
    _chain(
        "falcon_h1",
        **_GROUPED,
        head_dim=8,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_ssm=64,
        mamba_d_state=8,
        mamba_n_groups=1,
        mamba_chunk_size=8,
    ),
    _chain(
        "bamba",
        **_GROUPED,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_chunk_size=8,
    ),
    # Given several tokens at once, these restart from an empty state (as of transformers 5.23)
    _plain("mamba", state_size=8),
    _plain("falcon_mamba", state_size=8),
    _plain(
        "jamba",
        **_GROUPED,
        num_experts=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        use_mamba_kernels=False,
        mamba_d_state=8,
    ),
    # These keep their state outside of the cache
    _plain(
        "recurrent_gemma",
        **_GROUPED,
        lru_width=32,
        attention_window_size=16,
        num_hidden_layers=3,
    ),
    _plain("rwkv", attention_hidden_size=32),
]


def build(architecture: Architecture, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model of the architecture; the same at each call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(architecture.model_type, **{**_SHAPE, **architecture.config})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def small(model_type: str, dtype: torch.dtype = torch.float32, **config: Any) -> PreTrainedModel:
    """A random model of a type with these values in its configuration."""
    return build(Architecture(model_type, "", config), dtype)
