from __future__ import annotations

import threading

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, build
from shared_data import whats_missing
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)  # tiny models: more threads only wait for each other
# By default its lock is shared with forked processes, and one that a test kills may hold it.
tqdm.set_lock(threading.RLock())


def pytest_terminal_summary(terminalreporter):
    """Says once what data was missing, and where to get it."""
    for line in whats_missing():
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def models_by_type():
    """Builds the tiny random model of a model type, once a session."""
    by_type = {architecture.model_type: architecture for architecture in ARCHITECTURES}
    built = {}

    def get(model_type: str):
        if model_type not in built:
            built[model_type] = build(by_type[model_type])
        return built[model_type]

    return get


@pytest.fixture(scope="session")
def llama(models_by_type):
    return models_by_type("llama")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
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


@pytest.fixture(scope="session")
def byte_llama(tokenizer) -> LlamaForCausalLM:
    """A random model of bytes. It soon repeats itself, so that drafts are accepted."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
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
