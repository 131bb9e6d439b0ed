"""Names of models, tokenizers and stored folders: a folder of this machine, or a repo on the Hub.

A name that can only be a path and does not exist is refused at once. For any other model the Hub is
asked once, for three seconds at most: huggingface_hub itself tries for half a minute for each file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedTokenizerBase

from ..corpus.untrusted import one_line

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"  # of the default model
HUB_SECONDS = 3.0  # to wait for the Hub's answer

# Without one of these transformers makes up a tokenizer that knows no words.
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tokenizer_config.json",
)
# Endings of files; a repo's name can have other dots, as in "org/model-1.5".
_EXTENSION = re.compile(
    r"\.(jsonl?|txt|md|py|csv|parquet|gz|zip|safetensors|bin|gguf|pth?)", re.IGNORECASE
)


def is_here(name: str | os.PathLike[str], needs_owner: bool = False) -> bool:
    """True if a name is an existing path, False if it may be a repo on the Hub; refuses others.

    Only models can lack an owner."""
    if os.path.exists(name):
        return True
    name = os.fspath(name)
    can_be_repo = "/" in name or not needs_owner
    if can_be_repo and not _EXTENSION.fullmatch(os.path.splitext(name)[1]):
        with suppress(HFValidationError):
            validate_repo_id(name)
            return False
    raise FileNotFoundError(f"{name!r} does not exist; name a folder, or a Hub id such as org/name")


def ask_hub(repo_id: str, noun: str, file: str, repo_type: str = "model") -> str | None:
    """Asks the Hub for a repo, which must exist; returns why the Hub does not answer, if so."""
    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    url = hf_hub_url(repo_id, file, repo_type=repo_type)
    answer: Future[object] = Future()

    def ask() -> None:
        try:
            answer.set_result(get_hf_file_metadata(url, timeout=HUB_SECONDS))
        except Exception as error:
            answer.set_exception(error)

    # In a thread: no timeout bounds the look-up of a host's name, and each address has its own.
    Thread(target=ask, daemon=True).start()
    try:
        answer.result(HUB_SECONDS)
    except RepositoryNotFoundError as error:
        page = f"{constants.ENDPOINT}/{'datasets/' * (repo_type == 'dataset')}{repo_id}"
        raise OSError(
            f"there is neither a folder {repo_id!r} nor a {noun} of this name on the Hub that you "
            f"may read; check the name. If {page} is private or grants access on request, set "
            "HF_TOKEN or run `hf auth login`"
        ) from error
    except Exception as error:  # no network, a proxy's page, a mirror without this repo
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
            return None  # the file is missing, for example; reading the repo says more
        reason = one_line(error) or f"no answer in {HUB_SECONDS:g} seconds"
        return f"{constants.ENDPOINT} does not answer: {reason}"
    return None


def _any_cached(repo_id: str, files: Sequence[str]) -> bool:
    return any(isinstance(try_to_load_from_cache(repo_id, file), str) for file in files)


def model_source(
    name: str, noun: str = "model", files: Sequence[str] = ("config.json",)
) -> dict[str, Any]:
    """Arguments with which `from_pretrained` loads a model without waiting for the Hub."""
    silent = None
    if is_here(name):
        if not os.path.isdir(name):
            raise NotADirectoryError(f"{name} is a file; name the folder of a {noun}")
        if not any(Path(name, file).exists() for file in files):
            raise FileNotFoundError(f"{name} is not the folder of a {noun}: it has no {files[0]}")
    elif (silent := ask_hub(name, noun, files[-1])) and not _any_cached(name, files):
        where = "neither a folder here nor in the Hub's cache"
        raise OSError(f"{name!r} is {where}, and the Hub cannot be reached: {silent}")
    return {"pretrained_model_name_or_path": name, "local_files_only": silent is not None}


def named_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Loads a tokenizer from a folder or the Hub, and never code that comes with it."""
    source = model_source(name, "tokenizer", _TOKENIZER)
    from transformers import AutoTokenizer  # takes seconds, after a wrong name has been refused

    try:
        return AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
    except Exception as error:  # a damaged file can fail in several libraries
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"the tokenizer of {name} cannot be loaded: {one_line(error)}") from error


def local_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """The fast tokenizer in a folder or in the Hub's cache, if one can be loaded."""
    from transformers import AutoTokenizer

    with suppress(Exception):  # it is optional, and a damaged file can fail in several libraries
        places = (os.path.join(name, file) for file in _TOKENIZER if os.path.isdir(name))
        if any(map(os.path.exists, places)) or _any_cached(name, _TOKENIZER):
            options = {"local_files_only": True, "trust_remote_code": False}
            tokenizer = AutoTokenizer.from_pretrained(name, **options)
            return tokenizer if tokenizer.is_fast else None
    return None
