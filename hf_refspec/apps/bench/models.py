"""Llamas with random weights, which are as fast as trained ones."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

# Hidden size, intermediate size, layers, attention heads, key-value heads. 1B has the shape of
# Llama 3.2 1B, 8B that of Llama 3.1 8B; the names leave out the embedding and output layers, whose
# sizes depend on the vocabulary. "tiny" is for replays of MAT alone.
SIZES = {
    "tiny": (16, 16, 1, 1, 1),
    "500M": (1536, 4096, 14, 12, 12),
    "1B": (2048, 8192, 16, 32, 8),
    "8B": (4096, 14336, 32, 32, 8),
}


def llama_config(size: str, vocab_size: int) -> LlamaConfig:
    """The configuration of a Llama of one of [`SIZES`]."""
    hidden, intermediate, layers, heads, key_value_heads = SIZES[size]
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=2**17,
    )


def random_model(
    size: str, vocab_size: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> LlamaForCausalLM:
    """A Llama with random weights, created on its device; the same one each time.

    Args:
        size (`str`): One of [`SIZES`].
        vocab_size (`int`): The size of the vocabulary.
        device (`str`, *optional*, defaults to `"cpu"`): The device.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Of the weights.
    """
    config = llama_config(size, vocab_size)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


class ForcedLlama(LlamaForCausalLM):
    """A Llama that writes the texts that it is given, whatever it would write by itself.

    A logits processor can force a text too, see [`~bench.replay.ForcedText`], but with one tokens
    are chosen one by one, each with a wait for the GPU: here `generate` is as fast as with a
    trained model.
    """

    MOST_ROWS, MOST_TOKENS = 8, 8192
    # Added to the logit of the next token: it then has a probability like that of a trained model.
    STRENGTH = 14.0

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        texts = torch.full((self.MOST_ROWS, self.MOST_TOKENS), -1)
        self.register_buffer("texts", texts, persistent=False)

    def force(self, texts: list[list[int]]) -> None:
        """Has row i of later calls write `texts[i]`, which begins with its prompt."""
        self.texts.fill_(-1)
        for row, text in zip(self.texts, texts, strict=False):
            row[: len(text)] = torch.tensor(text)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """The next token of the text has by far the highest logit behind each token that stands
        where the text has it."""
        outputs = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            logits_to_keep=logits_to_keep,
            **{**kwargs, "return_dict": True},
        )
        logits, kept = outputs.logits, outputs.logits.shape[1]
        if position_ids is None:
            return outputs
        texts = self.texts[: len(logits)]
        places = position_ids[:, -kept:].expand(len(logits), kept)
        on_text = texts.gather(1, places) == input_ids[:, -kept:]
        following = texts.gather(1, (places + 1).clamp(max=self.MOST_TOKENS - 1))
        bonus = self.STRENGTH * (on_text & (following >= 0))
        logits = logits.scatter_add(
            2, following.clamp(min=0)[..., None], bonus[..., None].to(logits.dtype)
        )
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)


def forced_model(
    size: str, vocab_size: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> ForcedLlama:
    """[`random_model`] as a [`ForcedLlama`]."""
    config = llama_config(size, vocab_size)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model: ForcedLlama = ForcedLlama._from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    return model.eval()
