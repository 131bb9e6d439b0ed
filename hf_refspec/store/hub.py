"""Stored folders on the Hugging Face Hub, as dataset repos: fetched and pushed."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    constants,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.errors import RemoteEntryNotFoundError

from .card import card
from .files import CONFIG, DatastoreError, check_file, open_file, unreadable
from .folder_config import FolderConfig
from .hub_repo import LIBRARY, commit
from .names import is_here, is_only_cached
from .printable import one_line

C = TypeVar("C", bound="FolderConfig")
# Reduces a config to one that names only some of its files.
Part: TypeAlias = Callable[[C], C]

CARD = "README.md"
# The Hub shows no more of a card; a larger one is not read.
_LARGEST_CARD = 1 << 22
# A snapshot in the Hub's cache has such a link for each file.
_LINK_TO_BLOB = r"\.\./\.\./blobs/[0-9a-f]{40,64}"


def fetch(
    repo_or_path: str | os.PathLike[str],
    kind: type[C],
    part: Part[C] = lambda config: config,
    revision: str | None = None,
    local_files_only: bool = False,
    **options: Any,
) -> Path:
    """Downloads config.json, the files that `part` of it names, and the card; returns the folder.

    See [`StoredFolder.from_pretrained`]; `options` are those of `huggingface_hub`."""
    if is_here(repo_or_path):
        return Path(repo_or_path)
    repo_id = os.fspath(repo_or_path)
    if "/" not in repo_id:  # a mistyped folder: stores belong to an organisation
        raise FileNotFoundError(
            f"{repo_id!r} does not exist; name a folder, or a Hub id such as org/name"
        )
    cached_only = local_files_only or is_only_cached(
        repo_id, kind.NOUN, [CONFIG], "dataset", revision, **options
    )
    options |= {"repo_type": "dataset", "local_files_only": cached_only, **LIBRARY}
    place = f"the dataset repo {repo_id!r} at revision {revision or constants.DEFAULT_REVISION!r}"
    wanted = CONFIG
    try:
        folder = Path(hf_hub_download(repo_id, CONFIG, revision=revision, **options)).parent
        names = [file.name for file in part(kind.read(folder)).files()]
        # The commit that config.json is from, even if another one is pushed meanwhile.
        pinned = folder.name
        patterns = [CARD, *(glob.escape(name) for name in names)]
        snapshot_download(repo_id, revision=pinned, allow_patterns=patterns, **options)
        # It does not miss files that the repo, or offline the cache, lacks.
        for wanted in names:
            if not (folder / wanted).exists():
                hf_hub_download(repo_id, wanted, revision=pinned, **options)
    except DatastoreError as error:
        raise DatastoreError(f"{place} cannot be used: {error}") from error
    except RemoteEntryNotFoundError as error:
        raise DatastoreError(f"{place} is not a {kind.NOUN}: it has no {wanted}") from error
    except Exception as error:  # of several libraries
        raise OSError(f"{place} was not downloaded: {one_line(error)}") from error
    return folder


def push(
    folder: str | os.PathLike,
    kind: type[FolderConfig],
    repo_id: str,
    token: str | bool | None = None,
    commit_message: str | None = None,
    **target: Any,
) -> CommitInfo:
    """Checks a folder and publishes it, see [`StoredFolder.push_to_hub`]; the commit also removes
    the files of an older version."""
    folder = Path(folder)
    config = kind.opened(folder, lambda config: _checked(folder, config))
    card_text = _read_card(folder)

    def operations(repo_id: str, present: list[str]) -> list[Any]:
        named = {file.name for file in config.files()}
        old = (name for name in present if any(each.matches(name) for each in config.FILES))
        # What was read and checked, even if config.json is replaced during the upload.
        return [
            CommitOperationAdd(CONFIG, config.as_json(folder)),
            CommitOperationAdd(CARD, card_text or card(config, repo_id).encode()),
            *(CommitOperationAdd(name, folder / name) for name in named),
            *(CommitOperationDelete(path_in_repo=name) for name in old if name not in named),
        ]

    message = commit_message or f"Upload the {kind.NOUN}"
    what = f"the {kind.NOUN} in {folder}"
    return commit(what, repo_id, "dataset", operations, message, token, **target)


def _checked(folder: Path, config: C) -> C:
    for entry in config.files():
        check_file(folder, entry)
    return config


def _read_card(folder: Path) -> bytes | None:
    """The content of the folder's README.md, if there is one.

    It has no checksum, unlike the other files: a link could publish any file of this machine. Only
    links of the Hub's cache to files of the cache are followed.
    """
    path = folder / CARD
    if path.is_symlink() and re.fullmatch(_LINK_TO_BLOB, os.readlink(path)):
        path = folder / os.readlink(path)
    if path.is_symlink():
        raise DatastoreError(f"{path} is a link, which is not followed; put the file itself there")
    try:
        with open_file(path) as file:
            text = file.read(_LARGEST_CARD + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from None
    if len(text) > _LARGEST_CARD:
        raise DatastoreError(f"{path} has more than {_LARGEST_CARD:,} bytes, too many for a card")
    return text
