"""Stored folders on the Hugging Face Hub, as dataset repos: they are fetched and pushed."""

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
    HfApi,
    constants,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RevisionNotFoundError,
)

from .card import card
from .files import CONFIG, DatastoreError, check_file, open_file, unreadable
from .folder import FolderConfig
from .hub_repo import LIBRARY, open_repo, push_reason
from .names import is_here, is_only_cached
from .printable import one_line

C = TypeVar("C", bound=FolderConfig)
# Of a config, a config that names only some of its files.
Part: TypeAlias = Callable[[C], C]

CARD = "README.md"
# The Hub shows no more of a card, and what no real one comes near is not read.
_LARGEST_CARD = 1 << 22
# Such a link has a snapshot in the Hub's cache for each file.
_LINK_TO_BLOB = r"\.\./\.\./blobs/[0-9a-f]{40,64}"


def fetch(
    repo_or_path: str | os.PathLike[str],
    kind: type[C],
    part: Part[C] = lambda config: config,
    revision: str | None = None,
    local_files_only: bool = False,
    **options: Any,
) -> Path:
    """Downloads config.json, the files that a part of it names, and the card; returns the folder.

    See [`StoredFolder.from_pretrained`]. `part` is by default the whole config; of the other
    arguments, `options` are for `huggingface_hub`.

    Raises:
        OSError: If there is no such repo or revision, or it cannot be read or reached.
        DatastoreError: If it is not of that kind, or `part` raises it.
    """
    if is_here(repo_or_path):
        return Path(repo_or_path)
    repo_id = os.fspath(repo_or_path)
    if "/" not in repo_id:  # nobody has stores without an organisation: it is a mistyped folder
        raise FileNotFoundError(
            f"{repo_id!r} does not exist; name a folder, or a Hub id such as org/name"
        )
    cached_only = local_files_only or is_only_cached(
        repo_id, kind.NOUN, [CONFIG], "dataset", revision, **options
    )
    options |= {"repo_type": "dataset", "local_files_only": cached_only, **LIBRARY}
    wanted = CONFIG
    try:
        folder = Path(hf_hub_download(repo_id, CONFIG, revision=revision, **options)).parent
        names = [file.name for file in part(kind.read(folder)).files()]
        # The commit that config.json is from, even if another one is pushed meanwhile.
        commit = folder.name
        wanted = "a file"
        patterns = [CARD, *(glob.escape(name) for name in names)]
        snapshot_download(repo_id, revision=commit, allow_patterns=patterns, **options)
        # It is content with what is there, in the repo and, if that is out of reach, in the cache.
        for wanted in names:
            if not (folder / wanted).exists():
                hf_hub_download(repo_id, wanted, revision=commit, **options)
    except Exception as error:  # It raises those of several libraries, not all of them its own.
        raise _fetch_error(error, kind, repo_id, revision, wanted, local_files_only) from error
    return folder


def _fetch_error(
    error: Exception,
    kind: type[FolderConfig],
    repo_id: str,
    revision: str | None,
    wanted: str,
    local_files_only: bool,
) -> Exception:
    """The error to raise instead of `error`, which names the repo and the way out."""
    repo = f"the dataset repo {repo_id!r}"
    place = f"{repo} at revision {revision or constants.DEFAULT_REVISION!r}"
    # The narrower error stands before the wider one that it is derived from.
    match error:
        case DatastoreError():
            return DatastoreError(f"{place} cannot be used: {error}")
        case RevisionNotFoundError():
            return OSError(
                f"{repo} has no revision {revision!r}; name one of its branches, tags or commits, "
                f"or leave revision out"
            )
        case LocalEntryNotFoundError() if local_files_only:
            return OSError(
                f"{place} is not in the cache, or not all of it; with local_files_only=False it "
                f"is downloaded"
            )
        case LocalEntryNotFoundError():
            return _out_of_reach(place, error.__cause__ or error)
        # Where one of its threads cannot connect, huggingface_hub closes the client of all (2.4).
        case RuntimeError() if "client has been closed" in str(error):
            return _out_of_reach(place, error)
        case EntryNotFoundError() if wanted == CONFIG:
            return DatastoreError(f"{place} is not a {kind.NOUN}: it has no {CONFIG}")
        case EntryNotFoundError():
            return DatastoreError(f"{place} is damaged: it lacks {wanted}, which {CONFIG} names")
        case HfHubHTTPError() if error.response.status_code in (401, 403):
            return OSError(
                f"the Hub does not let you read {place} ({one_line(error)}); pass another token= "
                f"or run `hf auth login`"
            )
    return OSError(
        f"{place} was not downloaded completely ({one_line(error)}); try again, files that are "
        f"complete are not downloaded twice"
    )


def _out_of_reach(place: str, error: BaseException) -> OSError:
    return OSError(
        f"{place} is not in the cache, or not all of it, and the Hub cannot be reached "
        f"({one_line(error)}); check the connection and try again"
    )


def push(
    folder: str | os.PathLike,
    kind: type[FolderConfig],
    repo_id: str,
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> CommitInfo:
    """Publishes a folder that is read and checked first, see [`StoredFolder.push_to_hub`].

    The commit also removes the files of an older version of the folder.
    """
    folder = Path(folder)
    config = kind.opened(folder, lambda config: _checked(folder, config))
    card_text = _read_card(folder)
    api = HfApi(token=token, **LIBRARY)
    try:
        repo_id, before = open_repo(api, repo_id, "dataset", private, revision, not create_pr)
        present = api.list_repo_files(repo_id, repo_type="dataset", revision=before)
        return api.create_commit(
            repo_id,
            [
                *_additions(folder, config, card_text or card(config, repo_id).encode()),
                *_deletions(config, present),
            ],
            commit_message=commit_message or f"Upload the {kind.NOUN}",
            repo_type="dataset",
            revision=revision,
            create_pr=create_pr,
            # Whoever pushes at the same time is not overwritten.
            parent_commit=before,
        )
    except Exception as error:  # It raises those of several libraries, not all of them its own.
        raise OSError(
            f"the {kind.NOUN} in {folder} was not pushed to {repo_id!r} at revision "
            f"{revision or constants.DEFAULT_REVISION!r}: {push_reason(error)}"
        ) from error


def _checked(folder: Path, config: C) -> C:
    """The config of a folder whose files are as they were written."""
    for entry in config.files():
        check_file(folder, entry)
    return config


def _read_card(folder: Path) -> bytes | None:
    """What the folder's README.md says, if there is one.

    No checksum vouches for it, as one does for the other files: if it is a link, it could be one to
    any file of this machine, which would be published. Only the links of the Hub's cache, which are
    to files of the cache, are followed.
    """
    path = folder / CARD
    if path.is_symlink() and re.fullmatch(_LINK_TO_BLOB, os.readlink(path)):
        path = folder / os.readlink(path)
    try:
        with open_file(path, follow_links=False) as file:
            text = file.read(_LARGEST_CARD + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from None
    if len(text) > _LARGEST_CARD:
        raise DatastoreError(f"{path} has more than {_LARGEST_CARD:,} bytes, too many for a card")
    return text


def _additions(folder: Path, config: FolderConfig, card_text: bytes) -> list[CommitOperationAdd]:
    # What has been read and checked, even if config.json is replaced during the upload.
    return [
        CommitOperationAdd(CONFIG, config.as_json(folder)),
        CommitOperationAdd(CARD, card_text),
        *(CommitOperationAdd(file.name, folder / file.name) for file in config.files()),
    ]


def _deletions(config: FolderConfig, present: list[str]) -> list[CommitOperationDelete]:
    named = {file.name for file in config.files()}
    return [
        CommitOperationDelete(path_in_repo=name)
        for name in present
        if name not in named and any(names.matches(name) for names in config.FILES)
    ]
