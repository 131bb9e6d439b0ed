"""What a name stands for: a folder of this machine, or a repo on the Hub.

Models, tokenizers and stored folders are all named so. What can only be a path and is none is
refused at once. The Hub is asked once before anything else, and not waited for: huggingface_hub
itself tries again for half a minute for each file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any

from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedTokenizerBase

from .printable import one_line

# How long the Hub may take to answer: whoever has no network waits for it, but once a minute.
HUB_SECONDS = 3.0
_SILENT_SECONDS = 60.0
_silent_since: dict[str, float] = {}  # by endpoint

_MODEL = ("config.json",)
# Without one of these transformers makes up a tokenizer that knows no words.
_TOKENIZER = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
    "tokenizer_config.json",
)
# Of files that somebody may name; a repo's name can have other dots, as in "org/model-1.5".
_EXTENSIONS = (
    *(".json", ".jsonl", ".txt", ".md", ".py", ".csv", ".parquet", ".gz", ".zip"),
    *(".safetensors", ".bin", ".gguf", ".pt", ".pth"),
)


class HubSilentError(OSError):
    """The Hub does not answer."""


def is_here(name: str | os.PathLike[str]) -> bool:
    """Whether a name is a path of this machine; if not, it can be that of a repo on the Hub.

    Raises:
        FileNotFoundError: If it can only be a path, and there is nothing at it.
    """
    if os.path.exists(name):
        return True
    if _can_only_be_path(os.fspath(name)):
        raise FileNotFoundError(
            f"{os.fspath(name)!r} does not exist; name a folder, or a Hub id such as org/name"
        )
    return False


def _can_only_be_path(name: str) -> bool:
    if name.startswith(("/", ".", "~")) or "\\" in name or name.lower().endswith(_EXTENSIONS):
        return True
    try:
        validate_repo_id(name)  # which may have one slash
    except HFValidationError:
        return True
    return False


def ask_hub(
    repo_id: str,
    file: str,
    repo_type: str = "model",
    revision: str | None = None,
    token: str | bool | None = None,
) -> HfHubHTTPError | None:
    """Asks the Hub for a file of a repo, without downloading it.

    Returns:
        `HfHubHTTPError`, *optional*: Why it does not have it, or does not show it.

    Raises:
        HubSilentError: If it does not answer in time, or answers that it is out of order.
    """
    if constants.is_offline_mode():
        raise HubSilentError("HF_HUB_OFFLINE is set")
    endpoint = constants.ENDPOINT
    if monotonic() - _silent_since.get(endpoint, -_SILENT_SECONDS) < _SILENT_SECONDS:
        raise HubSilentError(f"{endpoint} does not answer")
    url = hf_hub_url(repo_id, file, repo_type=repo_type, revision=revision)
    answers: list[Exception | None] = []

    def ask() -> None:
        try:
            get_hf_file_metadata(url, token=token, timeout=HUB_SECONDS)
            answers.append(None)
        except Exception as error:  # no network, a proxy's page, a mirror without this repo
            answers.append(error)

    # In a thread: no timeout bounds the look-up of a host's name, and each address has its own.
    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    answer = answers[0] if answers else TimeoutError(f"no answer in {HUB_SECONDS:g} seconds")
    if answer is None or (isinstance(answer, HfHubHTTPError) and answer.response.status_code < 500):
        return answer
    _silent_since[endpoint] = monotonic()
    raise HubSilentError(f"{endpoint} does not answer: {one_line(answer)}")


def is_only_cached(
    repo_id: str,
    noun: str,
    files: Sequence[str],
    repo_type: str = "model",
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> bool:
    """Whether a repo has to be read from the Hub's cache, as the Hub does not answer.

    Args:
        noun (`str`): What it should be, for messages.
        files: One of them shows that it is in the cache; the Hub is asked for the last one.
        repo_id, repo_type, revision, token, cache_dir: As in `huggingface_hub`.

    Raises:
        OSError: If it is not in the cache then, or the Hub says that there is no such repo.
    """
    try:
        answer = ask_hub(repo_id, files[-1], repo_type, revision, token)
    except HubSilentError as error:
        cache = None if cache_dir is None else Path(cache_dir)
        paths = (
            try_to_load_from_cache(repo_id, file, cache, revision, repo_type) for file in files
        )
        if any(isinstance(path, str) for path in paths):
            return True
        raise OSError(
            f"{repo_id!r} is no folder here and not in the Hub's cache, and the Hub cannot be "
            f"reached: {error}"
        ) from error
    match answer:  # The narrower error stands before the wider one that it is derived from.
        case GatedRepoError():
            place = f"{'datasets/' if repo_type == 'dataset' else ''}{repo_id}"
            raise OSError(
                f"access to {repo_id!r} is granted on request; ask for it at "
                f"{constants.ENDPOINT}/{place}, then pass token= or run `hf auth login`"
            ) from answer
        case RepositoryNotFoundError():
            raise OSError(
                f"there is neither a folder {repo_id!r} nor a {noun} of this name on the Hub that "
                "you may read; check the name, or if it is private pass token= or run "
                "`hf auth login`"
            ) from answer
    return False  # of what it lacks otherwise, whoever reads it says more


def model_source(name: str) -> dict[str, Any]:
    """The arguments of `from_pretrained` with which a model is loaded without waiting for a Hub.

    Raises:
        OSError: If it is neither a folder with a model nor one on the Hub that can be read, or is
            not in the cache while the Hub does not answer.
    """
    return _source(name, "model", _MODEL)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Loads a tokenizer from a folder or the Hub, and never code that comes with it.

    Raises:
        OSError: As [`model_source`], or if it cannot be read.
        ValueError: If it is no tokenizer that transformers knows.
    """
    source = _source(name, "tokenizer", _TOKENIZER)
    from transformers import AutoTokenizer  # which takes seconds, and a wrong name is said before

    try:
        return AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
    except Exception as error:  # a damaged file can fail in several libraries
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"the tokenizer of {name} cannot be loaded: {one_line(error)}") from error


def _source(name: str, noun: str, files: Sequence[str]) -> dict[str, Any]:
    """`files` are those of which at least one makes a folder one of a `noun`."""
    local_files_only = False
    if is_here(name):
        if not os.path.isdir(name):
            raise NotADirectoryError(f"{name} is a file; name the folder of a {noun}")
        if not any(Path(name, file).exists() for file in files):
            raise FileNotFoundError(f"{name} is not the folder of a {noun}: it has no {files[0]}")
    else:
        local_files_only = is_only_cached(name, noun, files)
    return {"pretrained_model_name_or_path": name, "local_files_only": local_files_only}
