"""Stored folders on the Hugging Face Hub, as dataset repos: they are fetched and pushed."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
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
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..version import __version__
from .card import card
from .files import CONFIG, DatastoreError, check_file
from .folder import FolderConfig

C = TypeVar("C", bound=FolderConfig)
# Of a config, a config that names only some of its files.
Part: TypeAlias = Callable[[C], C]

CARD = "README.md"
_LIBRARY: dict[str, Any] = {"library_name": "hf_refspec", "library_version": __version__}


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
    if Path(repo_or_path).exists():
        return Path(repo_or_path)
    repo_id = os.fspath(repo_or_path)
    if "/" not in repo_id:  # the Hub would be asked again and again, for what is a mistyped folder
        raise _neither(repo_id)
    options |= {"repo_type": "dataset", "local_files_only": local_files_only, **_LIBRARY}
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


def _neither(name: str) -> OSError:
    return OSError(
        f"{name!r} is neither a folder nor the name of a dataset repo on the Hub "
        f'("organisation/name"); check the path'
    )


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
        case HFValidationError():
            return _neither(repo_id)
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
                f"the Hub does not let you read {place} ({_one_line(error)}); pass another token= "
                f"or run `hf auth login`"
            )
    return OSError(
        f"{place} was not downloaded completely ({_one_line(error)}); try again, files that are "
        f"complete are not downloaded twice"
    )


def _out_of_reach(place: str, error: BaseException) -> OSError:
    return OSError(
        f"{place} is not in the cache, or not all of it, and the Hub cannot be reached "
        f"({_one_line(error)}); check the connection and try again"
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
    config = kind.read(folder)
    for entry in config.files():
        check_file(folder, entry)
    api = HfApi(token=token, **_LIBRARY)
    try:
        repo_id, before = _open_repo(api, repo_id, private, revision, not create_pr)
        present = api.list_repo_files(repo_id, repo_type="dataset", revision=before)
        return api.create_commit(
            repo_id,
            [*_additions(folder, config, repo_id), *_deletions(config, present)],
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


def _open_repo(
    api: HfApi, repo_id: str, private: bool | None, revision: str | None, new_branch: bool
) -> tuple[str, str | None]:
    """Creates a repo, and a branch, where there are none; returns the repo's id and its commit."""
    repo_id = api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True).repo_id
    if new_branch and revision and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, repo_type="dataset", exist_ok=True)
    info = api.dataset_info(repo_id, revision=revision)
    if private is not None and info.private != private:
        # An existing repo stays as it is, and what was to be private would be public.
        raise ValueError(
            f"the repo is {'private' if info.private else 'public'} already; change that in "
            f"its settings, or leave private={private} out"
        )
    return repo_id, info.sha


def _additions(folder: Path, config: FolderConfig, repo_id: str) -> list[CommitOperationAdd]:
    with TemporaryDirectory() as copy:
        # What has been read and checked, even if config.json is replaced during the upload.
        config.write(Path(copy))
        content = (Path(copy) / CONFIG).read_bytes()
    written = folder / CARD
    text = written.read_bytes() if written.exists() else card(config, repo_id).encode()
    return [
        CommitOperationAdd(CONFIG, content),
        CommitOperationAdd(CARD, text),
        *(CommitOperationAdd(file.name, folder / file.name) for file in config.files()),
    ]


def _deletions(config: FolderConfig, present: list[str]) -> list[CommitOperationDelete]:
    named = {file.name for file in config.files()}
    return [
        CommitOperationDelete(path_in_repo=name)
        for name in present
        if name not in named and any(names.matches(name) for names in config.FILES)
    ]


def push_reason(error: Exception) -> str:
    """Why a push failed, and what to do."""
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
