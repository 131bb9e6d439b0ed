"""A tokenizer of bytes and a tiny random model of them, and a tokenizer of words."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def changed(original: Any, **attributes: Any) -> Any:
    """A copy of a model, its configuration or a tokenizer, with other attributes."""
    other = copy.deepcopy(original)
    for name, value in attributes.items():
        setattr(other, name, value)
    return other


def byte_tokenizer(alphabet: Iterable[str] | None = None) -> PreTrainedTokenizerFast:
    """One token a byte, or for each of some printable ones, and a chat template."""
    alphabet = alphabet or sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    )


def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """Tokens of several bytes, and added ones as Qwen's: of tags, which are text, and of chats."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(['{"name": "f", "arguments": {}}\n</tool_call>'] * 4, trainer)
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tags = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template="{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )


def word_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """One token a word, the first for all others."""
    unknown, *_ = words = list(words)
    vocab = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=unknown)


def byte_llama(vocab_size: int) -> LlamaForCausalLM:
    """A random model of bytes. It soon repeats itself, so that drafts are accepted."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()
