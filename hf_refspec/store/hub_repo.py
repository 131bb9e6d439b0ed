"""Repos on the Hugging Face Hub: they are made, and files are committed to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from ..version import __version__
from .printable import one_line

RepoType: TypeAlias = Literal["dataset", "model", "space"]

LIBRARY: dict[str, Any] = {"library_name": "hf_refspec", "library_version": __version__}


def push_files(
    repo_id: str,
    repo_type: RepoType,
    files: Mapping[str, bytes],
    private: bool | None = None,
    token: str | bool | None = None,
) -> CommitInfo:
    """Puts files into a repo in one commit; the others that it has stay.

    Args:
        repo_id (`str`): "organisation/name"; made if it is not there. A new Space is for Gradio.
        repo_type (`str`): "model" or "space".
        files (mapping of `str` to `bytes`): Their paths in the repo, and what is in them.
        private (`bool`, *optional*): What a new repo is, and one that is there must be.
        token (`str` or `bool`, *optional*): As `huggingface_hub` takes it.

    Raises:
        OSError: If the Hub does not take them; nothing is half done.
    """
    api = HfApi(token=token, **LIBRARY)
    try:
        repo_id, before = open_repo(api, repo_id, repo_type, private)
        return api.create_commit(
            repo_id,
            [CommitOperationAdd(path, content) for path, content in files.items()],
            commit_message=f"Written by hf_refspec {__version__}",
            repo_type=repo_type,
            parent_commit=before,
        )
    except Exception as error:  # It raises those of several libraries, not all of them its own.
        raise OSError(
            f"the {repo_type} {repo_id!r} was not written: {push_reason(error)}"
        ) from error


def open_repo(
    api: HfApi,
    repo_id: str,
    repo_type: RepoType,
    private: bool | None = None,
    revision: str | None = None,
    new_branch: bool = False,
) -> tuple[str, str | None]:
    """Creates a repo, and a branch, where there are none; returns the repo's id and its commit.

    Raises:
        ValueError: If it is there and not as `private` says.
    """
    sdk = "gradio" if repo_type == "space" else None
    repo = api.create_repo(
        repo_id, repo_type=repo_type, private=private, exist_ok=True, space_sdk=sdk
    )
    if new_branch and revision and not revision.startswith("refs/"):
        api.create_branch(repo.repo_id, branch=revision, repo_type=repo_type, exist_ok=True)
    info = api.repo_info(repo.repo_id, repo_type=repo_type, revision=revision)
    if private is not None and info.private != private:
        # An existing repo stays as it is, and what was to be private would be public.
        raise ValueError(
            f"the repo is {'private' if info.private else 'public'} already; change that in "
            f"its settings, or leave private={private} out"
        )
    return repo.repo_id, info.sha


def push_reason(error: Exception) -> str:
    """Why nothing was pushed, and the way out."""
    match error:
        case HFValidationError():
            return f'this is not a name for a repo ("organisation/name"): {error}'
        case HfHubHTTPError() if error.response.status_code == 412:
            return "somebody else changed the repo meanwhile; look at it and push again"
        case HfHubHTTPError() if error.response.status_code in (401, 403):
            return (
                f"the Hub does not let you write there ({one_line(error)}); pass a token= that "
                f"may write, or run `hf auth login`"
            )
        case ValueError():
            return one_line(error)
    return f"{one_line(error)}; a push is one commit, so nothing is half done: push again"
