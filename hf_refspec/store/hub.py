"""Repos on the Hugging Face Hub: stored folders fetched and pushed, and files committed."""

from __future__ import annotations

import glob
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, Literal, TypeAlias

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    DatasetCardData,
    HfApi,
    constants,
    snapshot_download,
)
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import validate_repo_id
from tqdm import tqdm

from ..corpus.untrusted import one_line, printable, read_small
from ..version import __version__
from .files import CONFIG, DatastoreError
from .folder_config import FolderConfig
from .names import is_here

RepoType: TypeAlias = Literal["dataset", "model", "space"]

LIBRARY: dict[str, Any] = {"library_name": "hf_refspec", "library_version": __version__}
CARD = "README.md"
# The Hub shows no more of a card; a larger one is not read.
_LARGEST_CARD = 1 << 22
# A snapshot in the Hub's cache has such a link for each file.
_LINK_TO_BLOB = r"\.\./\.\./blobs/[0-9a-f]{40,64}"
TAGS = ["hf-refspec", "speculative-decoding"]
# Common licences that the Hub knows. It refuses a card with an unknown one: the card of any other
# says "other" and the name.
_HUB_LICENCE = re.compile(
    r"apache-2\.0|mit|isc|bsd(-[23]-clause)?|mpl-2\.0|unlicense|a?gpl-3\.0|gpl-2\.0|lgpl-(2\.1|3\.0)"
    r"|cc0-1\.0|cc-by(-sa)?-3\.0|cc-by(-nc)?(-sa|-nd)?-4\.0|odc-by|odbl|other"
)


def fetch(
    repo_or_path: str | os.PathLike[str],
    kind: type[FolderConfig],
    part: Callable[[Any], FolderConfig],
    revision: str | None = None,
    local_files_only: bool = False,
    **options: Any,
) -> Path:
    """Downloads config.json, the files that `part` of it names, and the card into the cache."""
    if is_here(repo_or_path, needs_owner=True):
        return Path(repo_or_path)
    repo_id = os.fspath(repo_or_path)
    options |= {"repo_type": "dataset", "local_files_only": local_files_only, **LIBRARY}
    place = f"the dataset repo {repo_id!r} at revision {revision or constants.DEFAULT_REVISION!r}"
    try:
        folder = Path(
            snapshot_download(repo_id, revision=revision, allow_patterns=CONFIG, **options)
        )
        names = [file.name for file in part(kind.read(folder)).files()]
        patterns = [CARD, *(glob.escape(name) for name in names)]
        # The commit that config.json is from, even if another one is pushed meanwhile.
        options["revision"] = folder.name
        snapshot_download(repo_id, allow_patterns=patterns, **options)
    except DatastoreError as error:
        raise DatastoreError(f"{place} cannot be used: {error}") from error
    except Exception as error:  # of several libraries
        raise OSError(f"{place} was not downloaded: {one_line(error)}") from error
    for name in names:
        if not (folder / name).exists():
            raise DatastoreError(f"{place} is not a {kind.NOUN}: it has no {name}")
    return folder


def push(folder: Path, kind: type[FolderConfig], repo_id: str, **target: Any) -> CommitInfo:
    """Checks and publishes a folder, and removes files of an older version from the repo."""
    validate_repo_id(repo_id)
    config = kind.read(folder)
    config.check_files(folder)
    stored_card = _read_card(folder)

    def operations(repo_id: str, present: list[str]) -> list[Any]:
        named = {file.name for file in config.files()}
        # The checked content, even if config.json is replaced during the upload.
        changes: list[Any] = [
            CommitOperationAdd(CONFIG, config.as_json(folder)),
            CommitOperationAdd(CARD, stored_card or card(config, repo_id).encode()),
        ]
        changes += [CommitOperationAdd(name, folder / name) for name in named]
        for name in present:
            if name not in named and any(pattern.fullmatch(name) for pattern in config.FILES):
                changes.append(CommitOperationDelete(path_in_repo=name))
        return changes

    return _commit(f"the {kind.NOUN} in {folder}", repo_id, "dataset", operations, **target)


def _read_card(folder: Path) -> bytes | None:
    """The content of the folder's README.md, if there is one."""
    path = folder / CARD
    # A link could publish any file of this machine, for the card has no checksum. Only links of the
    # Hub's cache to files of the cache are followed.
    if path.is_symlink() and re.fullmatch(_LINK_TO_BLOB, os.readlink(path)):
        path = folder / os.readlink(path)
    if path.is_symlink():
        raise DatastoreError(f"{path} is a link, which is not followed; put the file itself there")
    return read_small(path, _LARGEST_CARD) if path.exists() else None


def push_files(
    repo_id: str, repo_type: RepoType, files: Callable[[str], Mapping[str, bytes]], **target: Any
) -> CommitInfo:
    """Writes files, by their paths for the repo's full name, in one commit; its others stay."""

    def operations(repo_id: str, _present: list[str]) -> list[Any]:
        return [CommitOperationAdd(path, content) for path, content in files(repo_id).items()]

    return _commit(f"the {repo_type}", repo_id, repo_type, operations, **target)


def _commit(
    what: str,
    repo_id: str,
    repo_type: RepoType,
    operations: Callable[[str, list[str]], list[Any]],
    token: str | bool | None = None,
    private: bool | None = None,
    commit_message: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> CommitInfo:
    """Makes one commit to a repo, which is created (and the branch) if it is missing."""
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
            commit_message=commit_message or f"Written by hf_refspec {__version__}",
            revision=revision,
            create_pr=create_pr,
            parent_commit=repo.sha,  # refused if somebody has pushed meanwhile
            repo_type=repo_type,
        )
    except Exception as error:  # of several libraries
        hint = "a push is one commit, so the repo is unchanged: push again"
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            hint = "the Hub does not let you write there: use another token, or run `hf auth login`"
        place = f"{repo_id!r} at revision {branch!r}"
        raise OSError(f"{what} was not pushed to {place} ({one_line(error)}); {hint}") from error


def card(config: FolderConfig, repo_id: str) -> str:
    """The card of a stored folder in the repo `repo_id`: Markdown below a block of metadata."""
    source = getattr(config, "source", {})
    licence = source.get("license")
    metadata: dict[str, Any] = {"pretty_name": repo_id.split("/")[-1]}
    if licence:
        identifier = re.sub(r"[^a-z0-9.]+", "-", str(licence).lower()).strip("-")
        if _HUB_LICENCE.fullmatch(identifier):
            metadata["license"] = identifier
        else:
            metadata.update(license="other", license_name=identifier)
    metadata |= {"library_name": "hf_refspec", "task_categories": ["text-generation"]}
    if "/" in (model := getattr(config, "model", "")):
        metadata["base_model"] = model
    about = {field.name: getattr(config, field.name) for field in fields(config)}
    texts: dict[str, str] = defaultdict(lambda: "not stated")
    texts.update({name: cell(value) for name, value in (source | about).items() if value})
    texts.update(
        config.card_texts(),
        # The Hub's viewer would show config.json as rows of data.
        metadata=DatasetCardData(**metadata, tags=TAGS, viewer=False).to_yaml(),
        title=repo_id.split("/")[-1],
        repo=json.dumps(repo_id),
        files="\n".join(
            f"| `{file.name}` | {readable_size(file.size)} |" for file in config.files()
        ),
        licence_note="" if licence else " Which one it is has not been stated: find out first.",
    )
    template = Template((files(__package__) / config.TEMPLATE).read_text(encoding="utf-8"))
    return template.substitute(texts)


def cell(value: Any) -> str:
    """A value as text that cannot break out of the cell of a table."""
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return printable(" ".join(text.split())).replace("|", "\\|")


def readable_size(size: float) -> str:
    """A number of bytes with its unit."""
    return tqdm.format_sizeof(size, "B")
