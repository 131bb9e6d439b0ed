"""Folders on the Hugging Face Hub: how they come from there, and how they get there.

Datastores and knowledge bases are published alike, as dataset repos.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

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
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..version import __version__
from .card import datastore_card
from .folder import CONFIG, FILE_NAME, DatastoreError, FileEntry, StoreConfig, check_file

CARD = "README.md"
_LIBRARY: dict[str, Any] = {"library_name": "hf_refspec", "library_version": __version__}


class FolderConfig(Protocol):
    """What the config.json of a folder says that can be published."""

    def files(self) -> list[FileEntry]:
        """All files that the folder consists of, beside config.json."""

    def write(self, folder: Path) -> None:
        """Writes it into another folder."""


@dataclass(frozen=True)
class Kind:
    """A kind of folder that can be published.

    Attributes:
        noun (`str`): What it is called.
        file_name (`re.Pattern`): The names that its files can have.
        read (`Callable`): Reads the config.json of a folder.
        card (`Callable`): Writes the card for a config and a repo.
    """

    noun: str
    file_name: re.Pattern[str]
    read: Callable[[Path], FolderConfig]
    card: Callable[[Any, str | None], str]


DATASTORE = Kind("datastore", FILE_NAME, StoreConfig.read, datastore_card)


def fetch(
    repo_or_path: str | os.PathLike[str],
    form: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    kind: Kind = DATASTORE,
) -> Path:
    """Brings a folder onto this machine: config.json, the files that it names, and the card.

    Args:
        repo_or_path (`str` or `os.PathLike`):
            A folder, which is returned as it is, or else the name of a dataset repo on the Hub.
        form (`str`, *optional*):
            Of a datastore: `"compact"` leaves out the shards; `"full"` demands that there are
            shards. By default all is fetched that there is.
        revision (`str`, *optional*):
            A branch, a tag or a commit of the repo; by default its main branch.
        token (`str` or `bool`, *optional*):
            For private and gated repos; by default that of `hf auth login`.
        cache_dir (`str` or `os.PathLike`, *optional*):
            Where downloads are kept; by default huggingface_hub's cache.
        local_files_only (`bool`, *optional*, defaults to `False`):
            Whether to make do with what has been downloaded before.
        kind ([`Kind`], *optional*): What it is; by default a datastore.

    Returns:
        `Path`: The folder. With `form="compact"` the shards that its config.json names may be
        missing.

    Raises:
        ValueError: If `form` is none of these.
        OSError: If there is no such repo or revision, or it cannot be read or reached.
        DatastoreError: If it is not of that kind, or lacks that form.
    """
    if form not in (None, "full", "compact"):
        raise ValueError(f'form must be "full", "compact" or None, but is {form!r}')
    if Path(repo_or_path).exists():
        return Path(repo_or_path)
    repo_id = os.fspath(repo_or_path)
    options: dict[str, Any] = {
        "repo_type": "dataset",
        "token": token,
        "cache_dir": cache_dir,
        "local_files_only": local_files_only,
        **_LIBRARY,
    }
    wanted = CONFIG
    try:
        folder = Path(hf_hub_download(repo_id, CONFIG, revision=revision, **options)).parent
        names = _files_of_form(kind.read(folder), form)
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


def _files_of_form(config: FolderConfig, form: str | None) -> list[str]:
    if form is None or not isinstance(config, StoreConfig):
        return [file.name for file in config.files()]
    if form == "full" and not config.shards:
        raise DatastoreError('it has only the compact form; leave form="full" out')
    if form != "compact":
        return [file.name for file in config.files()]
    if config.ngrams is None:
        raise DatastoreError('it has no compact form; leave form="compact" out, or make one of it')
    return [config.ngrams.file.name]


def _fetch_error(
    error: Exception,
    kind: Kind,
    repo_id: str,
    revision: str | None,
    wanted: str,
    local_files_only: bool,
) -> Exception:
    """What to raise instead of `error`, in terms of what was asked for."""
    repo = f"the dataset repo {repo_id!r}"
    place = f"{repo} at revision {revision or constants.DEFAULT_REVISION!r}"
    # The narrower error stands before the wider one that it is derived from.
    match error:
        case DatastoreError():
            return DatastoreError(f"{place} cannot be used: {error}")
        case HFValidationError():
            return OSError(
                f"{repo_id!r} is neither a folder nor the name of a dataset repo on the Hub "
                f'("organisation/name"); check the path'
            )
        case GatedRepoError():
            return OSError(
                f"access to {place} is granted on request; ask for it at "
                f"{constants.ENDPOINT}/datasets/{repo_id}, then pass token= or run `hf auth login`"
            )
        case RepositoryNotFoundError():
            return OSError(
                f"there is neither a folder {repo_id!r} nor a dataset repo of this name on the "
                f"Hub that you may read (looked for revision "
                f"{revision or constants.DEFAULT_REVISION!r}); check the name, or if it is "
                f"private pass token= or run `hf auth login`"
            )
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
            return OSError(
                f"{place} is not in the cache, or not all of it, and the Hub cannot be reached "
                f"({_one_line(error.__cause__ or error)}); check the connection and try again"
            )
        case EntryNotFoundError() if wanted == CONFIG:
            return DatastoreError(f"{place} is not a {kind.noun}: it has no {CONFIG}")
        case EntryNotFoundError():
            return DatastoreError(f"{place} is damaged: it lacks {wanted}, which {CONFIG} names")
        case HfHubHTTPError() if error.response.status_code in (401, 403):
            return OSError(
                f"the Hub does not let you read {place} ({_one_line(error)}); pass another token= "
                f"or run `hf auth login`"
            )
    return OSError(
        f"{place} was not downloaded completely ({_one_line(error)}); try again, files that are "
        f"complete are not downloaded twice"
    )


def push(
    folder: str | os.PathLike[str],
    repo_id: str,
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    kind: Kind = DATASTORE,
) -> CommitInfo:
    """Publishes a folder as a dataset repo: config.json, the files that it names, and the card.

    All of it is one commit, which also removes the files of an older version of it. The folder's
    README.md is the card; where there is none, one is generated.

    Args:
        folder (`str` or `os.PathLike`): The folder. It is read completely first, and not published
            if it is damaged.
        repo_id (`str`): The repo's name on the Hub; it is created if there is none.
        private (`bool`, *optional*):
            Who can read the repo; by default as the repo is, or as your organisation has it.
        token (`str` or `bool`, *optional*): By default that of `hf auth login`.
        commit_message (`str`, *optional*):
            The first line of the commit's message; by default `"Upload the datastore"`.
        revision (`str`, *optional*):
            The branch, which is created if there is none; by default the main branch.
        create_pr (`bool`, *optional*, defaults to `False`):
            Whether to open a pull request instead of changing the branch.
        kind ([`Kind`], *optional*): What it is; by default a datastore.

    Returns:
        `CommitInfo`: What has been committed, with its address.

    Raises:
        DatastoreError: If the folder is not of that kind, or damaged.
        OSError: If it cannot be published. The repo is never left half changed.
    """
    folder = Path(folder)
    config = kind.read(folder)
    for entry in config.files():
        check_file(folder, entry)
    api = HfApi(token=token, **_LIBRARY)
    try:
        repo_id = api.create_repo(
            repo_id, repo_type="dataset", private=private, exist_ok=True
        ).repo_id
        if revision and not create_pr and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, repo_type="dataset", exist_ok=True)
        info = api.dataset_info(repo_id, revision=revision)
        if private is not None and info.private != private:
            # An existing repo stays as it is, and what was to be private would be public.
            raise ValueError(
                f"the repo is {'private' if info.private else 'public'} already; change that in "
                f"its settings, or leave private={private} out"
            )
        present = api.list_repo_files(repo_id, repo_type="dataset", revision=info.sha)
        return api.create_commit(
            repo_id,
            [*_additions(folder, config, repo_id, kind), *_deletions(config, present, kind)],
            commit_message=commit_message or f"Upload the {kind.noun}",
            repo_type="dataset",
            revision=revision,
            create_pr=create_pr,
            # Whoever pushes at the same time is not overwritten.
            parent_commit=info.sha,
        )
    except Exception as error:  # It raises those of several libraries, not all of them its own.
        raise OSError(
            f"the {kind.noun} in {folder} was not pushed to {repo_id!r} at revision "
            f"{revision or constants.DEFAULT_REVISION!r}: {_push_reason(error)}"
        ) from error


def _additions(
    folder: Path, config: FolderConfig, repo_id: str, kind: Kind
) -> list[CommitOperationAdd]:
    with TemporaryDirectory() as copy:
        # What has been read and checked, even if config.json is replaced during the upload.
        config.write(Path(copy))
        content = (Path(copy) / CONFIG).read_bytes()
    written = folder / CARD
    card = written.read_bytes() if written.exists() else kind.card(config, repo_id).encode()
    files = [file.name for file in config.files()]
    return [
        CommitOperationAdd(CONFIG, content),
        CommitOperationAdd(CARD, card),
        *(CommitOperationAdd(name, folder / name) for name in files),
    ]


def _deletions(config: FolderConfig, present: list[str], kind: Kind) -> list[CommitOperationDelete]:
    named = {file.name for file in config.files()}
    return [
        CommitOperationDelete(path_in_repo=name)
        for name in present
        if kind.file_name.fullmatch(name) and name not in named
    ]


def _push_reason(error: Exception) -> str:
    match error:
        case HFValidationError():
            return f'this is not a name for a repo ("organisation/name"): {error}'
        case HfHubHTTPError() if error.response.status_code == 412:
            return "somebody else changed the repo meanwhile; look at it and push again"
        case HfHubHTTPError() if error.response.status_code in (401, 403):
            return (
                f"the Hub does not let you write there ({_one_line(error)}); pass a token= that "
                f"may write, or run `hf auth login`"
            )
        case ValueError():
            return _one_line(error)
    return f"{_one_line(error)}; a push is one commit, so nothing is half done: push again"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
