"""Repos on the Hugging Face Hub: creating one and committing files to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, constants
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
    """Writes files, by their paths, into a repo in one commit; its other files stay. Arguments and
    errors as of [`commit`]."""
    additions = [CommitOperationAdd(path, content) for path, content in files.items()]
    message = f"Written by hf_refspec {__version__}"
    what = f"the {repo_type}"
    return commit(what, repo_id, repo_type, lambda *_: additions, message, token, private)


def commit(
    what: str,
    repo_id: str,
    repo_type: RepoType,
    operations: Callable[[str, list[str]], list[Any]],
    message: str,
    token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> CommitInfo:
    """Makes one commit to a repo; the repo (a Space is for Gradio) and the branch are created if
    they are missing.

    `what` is pushed, for the error message. `operations` returns those of the commit for the repo's
    full id and its present files. `private` is what a new repo is, and an existing one must be.
    """
    api = HfApi(token=token, **LIBRARY)
    branch = revision or constants.DEFAULT_REVISION
    try:
        sdk = "gradio" if repo_type == "space" else None
        repo_id = api.create_repo(
            repo_id, private=private, exist_ok=True, space_sdk=sdk, repo_type=repo_type
        ).repo_id
        if revision and not create_pr and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True, repo_type=repo_type)
        repo = api.repo_info(repo_id, revision=revision, repo_type=repo_type)
        if private is not None and repo.private != private:
            # create_repo leaves an existing repo as it is: private files would become public.
            raise ValueError(
                f"the repo is {'private' if repo.private else 'public'} already; change that in "
                f"its settings, or leave private={private} out"
            )
        present = [file.rfilename for file in getattr(repo, "siblings", None) or ()]
        return api.create_commit(
            repo_id,
            operations(repo_id, present),
            commit_message=message,
            revision=revision,
            create_pr=create_pr,
            parent_commit=repo.sha,  # refused if somebody has pushed meanwhile
            repo_type=repo_type,
        )
    except Exception as error:  # of several libraries
        raise OSError(
            f"{what} was not pushed to {repo_id!r} at revision {branch!r} ({one_line(error)}); "
            f"{_hint(error)}"
        ) from error


def _hint(error: Exception) -> str:
    if isinstance(error, HFValidationError):
        return 'this is not a name for a repo ("organisation/name")'
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
        return "the Hub does not let you write there: use another token, or run `hf auth login`"
    return "a push is one commit, so nothing is half done: push again"
