"""Loads the models and tokenizers of commands: by default SmolLM2-135M-Instruct."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ...corpus.untrusted import one_line
from ...drafting.candidates import HiddenStateDrafts
from ...drafting.contract import Drafter
from ...drafting.draft_model import DraftModel
from ...smollm2 import default_model
from ...store.names import HUB_ID, model_source, named_tokenizer
from ...store.stored_tokenizer import public_name
from ...text_config import text_config
from ...transformers_names import hidden_state_generator, is_block_drafter, reading_arguments


def name_for_people(name: str | None) -> str:
    """A model's name, without the path of its folder: for readers on other machines."""
    return public_name(name or HUB_ID)


def load_tokenizer(name: str | None = None) -> PreTrainedTokenizerBase:
    """Loads a tokenizer from a folder or the Hub; without a name the default model's."""
    return named_tokenizer(name or default_model())


def load_config(name: str | None, source: dict[str, Any] | None = None) -> PretrainedConfig:
    """The configuration of a decoder-only language model; refuses any other model."""
    source = source or model_source(name or default_model())
    try:
        config = AutoConfig.from_pretrained(**source)
    except (OSError, ValueError) as error:
        raise _unreadable(name, error) from error
    named = next(iter(config.architectures or ()), "")  # such as LlamaForCausalLM, GPT2LMHeadModel
    # transformers would give these an output layer of random weights
    other = "For" in named and not named.endswith(("ForCausalLM", "ForConditionalGeneration"))
    if config.is_encoder_decoder or other or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        found = f"{name or HUB_ID} is not a decoder-only language model"
        raise ValueError(f"{found} but a {named or type(config).__name__}; name another model")
    return config


def load_model(
    name: str | None = None,
    device_map: str | dict[str, Any] | None = None,
    dtype: torch.dtype | str | None = None,
) -> PreTrainedModel:
    """Loads a decoder-only language model, by default onto a GPU if there is one.

    The default model is float32, so that ids are equal. `device_map` is a device, or a map for
    accelerate."""
    source = model_source(name or default_model())
    load_config(name, source)
    dtype = dtype or ("float32" if name is None else "auto")
    device_map = device_map or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return AutoModelForCausalLM.from_pretrained(**source, dtype=dtype, device_map=device_map)
    except (AssertionError, OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise _unreadable(name, error) from error


def check_sources(sources: Iterable[Drafter], name: str | None) -> None:
    """Refuses sources of drafts with ids that a model lacks, before the model is loaded."""
    vocab_size = text_config(load_config(name)).vocab_size
    for source in sources:
        source.check(vocab_size)


def load_assistant(name: str) -> Callable[[PreTrainedModel], Drafter]:
    """A function that creates a drafter for a target model from a model that drafts.

    It may be a smaller one of the same family, an assistant of Gemma 4, or a block drafter."""
    source = model_source(name)
    kind = "dflash" if is_block_drafter(AutoConfig.from_pretrained(**source)) else None
    model = load_model(name) if kind is None else AutoModel.from_pretrained(**source)
    reading = reading_arguments(model, use_mtp=None, speculation_type=kind)

    def new_drafter(target: PreTrainedModel) -> Drafter:
        if reading:
            return HiddenStateDrafts(hidden_state_generator(target, **reading))
        drafter = DraftModel(model)
        drafter.check(text_config(target).vocab_size)
        return drafter

    return new_drafter


def layers_of(model: PreTrainedModel) -> Drafter:
    """The drafter of a model's own layers for multi-token prediction."""
    return HiddenStateDrafts(hidden_state_generator(model, use_mtp=True))


def _unreadable(name: str | None, error: Exception) -> ValueError:
    damaged = not name and isinstance(error, OSError | SafetensorError)
    hint = f"; delete {default_model()}, so that it is fetched again" if damaged else ""
    return ValueError(f"the model {name or HUB_ID} cannot be loaded: {one_line(error)}{hint}")
