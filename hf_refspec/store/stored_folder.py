"""The stored folder: a config.json that names all its files, and the operations on them.

    config.json       the kind of the folder, and its files with sizes and checksums
    *.safetensors     its arrays, memory-mapped
    README.md         the card, on the Hub

Datastores, knowledge bases, kNN datastores and recycling tables are such folders. A file never
changes once config.json names it, and config.json is replaced atomically: a process that has the
folder open is not disturbed.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, snapshot_download
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedTokenizerBase

from ..corpus.untrusted import DatastoreError, one_line, read_small
from ..notebooks import html_table
from . import hub
from .files import CONFIG, FileEntry, copy_file, new_folder
from .folder_config import FolderConfig
from .names import is_here

if TYPE_CHECKING:
    from typing_extensions import Self

C = TypeVar("C", bound=FolderConfig)
T = TypeVar("T")

# The Hub shows no more of a card; a larger one is not read.
_LARGEST_CARD = 1 << 22
# A snapshot in the Hub's cache has such a link for each file.
_LINK_TO_BLOB = r"\.\./\.\./blobs/[0-9a-f]{40,64}"


class StoredFolder(Generic[C]):
    """A folder that is open: [`Datastore`], [`KnowledgeBase`] or [`KnnDatastore`].

    Attributes:
        path (`Path`): The folder.
        config ([`FolderConfig`]): Its config.json.
    """

    config_type: ClassVar[type[Any]]
    path: Path
    config: C

    def __init__(self, path: str | os.PathLike, *arguments: Any) -> None:
        self.path = Path(path)
        self._arguments = arguments

        def opened(config: C) -> None:
            self.config = config
            self._open(config)

        self._read_with_retry(opened)

    def _open(self, config: C) -> None:
        """Opens the files that a config names."""

    def _read_with_retry(self, read: Callable[[C], T]) -> T:
        """Reads a config and by `read` its files; again if another process has replaced them."""
        config = self.config_type.read(self.path)
        while True:
            try:
                return read(config)
            except DatastoreError:
                failed = config
                config = self.config_type.read(self.path)
                if config == failed:
                    raise

    def _repr_html_(self) -> str:
        about: dict[str, Any] = {"path": self.path, "tokenizer": self.config.tokenizer}
        about |= {**getattr(self.config, "source", {}), **self.config.card_texts()}
        return html_table((name.replace("_", " "), text) for name, text in about.items() if text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path.absolute(), *self._arguments)  # a copy maps the same files

    @classmethod
    def from_pretrained(
        cls,
        repo_or_path: str | os.PathLike,
        *args: Any,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike | None = None,
        local_files_only: bool = False,
        **options: Any,
    ) -> Self:
        """Opens a folder, or a dataset repo on the Hub, of which only what is needed is downloaded.

        Args:
            repo_or_path (`str` or `Path`): A folder, or a repo id such as `"org/store"`.
            revision (`str`, *optional*): A branch, tag or commit.
            token (`str` or `bool`, *optional*): As in `huggingface_hub`.
            cache_dir (`str` or `Path`, *optional*): As in `huggingface_hub`.
            local_files_only (`bool`, *optional*, defaults to `False`): Use only what has been
                downloaded before.
            *args: Further arguments of the class, such as the tokenizer.
            **options: Its further keyword arguments.

        Raises:
            OSError: If the folder or repo is missing or cannot be reached.
            DatastoreError: As the class.
        """
        if is_here(repo_or_path, needs_owner=True):
            return cls(repo_or_path, *args, **options)
        repo_id = os.fspath(repo_or_path)
        repo: dict[str, Any] = {"repo_id": repo_id, "repo_type": "dataset", **hub.LIBRARY}
        repo |= {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
        place = f"the dataset repo {repo_id!r} at revision {revision or 'main'!r}"
        try:
            folder = Path(snapshot_download(revision=revision, allow_patterns=CONFIG, **repo))
            part = cls._part(cls.config_type.read(folder), *args, **options)
            names = [file.name for file in part.files()]
            patterns = [hub.CARD, *(glob.escape(name) for name in names)]
            # The commit that config.json is from, even if another one is pushed meanwhile.
            snapshot_download(revision=folder.name, allow_patterns=patterns, **repo)
        except DatastoreError as error:
            raise DatastoreError(f"{place} cannot be used: {error}") from error
        except Exception as error:  # of several libraries
            raise OSError(f"{place} was not downloaded: {one_line(error)}") from error
        for name in names:
            if not (folder / name).exists():
                raise DatastoreError(f"{place} is not a {cls.config_type.NOUN}: it has no {name}")
        return cls(folder, *args, **options)

    @classmethod
    def _part(cls, config: Any, *_: Any, **__: Any) -> FolderConfig:
        """The part of a config that the class, with these arguments, opens."""
        return config

    def save_pretrained(self, path: str | os.PathLike) -> None:
        """Copies all open files into a new folder.

        Raises:
            FileExistsError: If there is something at `path`.
            DatastoreError: If a file is damaged.
            OSError: If the folder cannot be written.
        """
        config = self._open_part
        with new_folder(path) as folder:
            for entry in config.files():
                copy_file(self.path, entry, folder)
            config.write(folder)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
    ) -> CommitInfo:
        """Publishes the folder as a dataset repo, in one commit, which is returned.

        The folder's README.md is the card; without one, a card is generated.

        Args:
            repo_id (`str`): Such as `"org/store"`; a missing repo is created. Without an owner it
                is yours.
            private (`bool`, *optional*): Makes a new repo private; by default as the owner of the
                account has set it.
            token (`str` or `bool`, *optional*): As in `huggingface_hub`.
            commit_message (`str`, *optional*): The first line of the commit's message.
            revision (`str`, *optional*): A branch; a missing one is created.
            create_pr (`bool`, *optional*, defaults to `False`): Open a pull request instead of
                changing the branch.

        Raises:
            ValueError: If `repo_id` is not a name for a repo.
            DatastoreError: If a file is damaged.
            OSError: If the repo cannot be written; it is never left half changed.
        """
        validate_repo_id(repo_id)
        config: FolderConfig = self.config_type.read(self.path)
        config.check_files(self.path)
        stored_card = _read_card(self.path)

        def operations(repo_id: str, present: list[str]) -> list[Any]:
            named = {file.name for file in config.files()}
            # The checked content, even if config.json is replaced during the upload.
            changes: list[Any] = [
                CommitOperationAdd(CONFIG, config.as_json(self.path)),
                CommitOperationAdd(hub.CARD, stored_card or hub.card(config, repo_id).encode()),
            ]
            changes += [CommitOperationAdd(name, self.path / name) for name in named]
            for name in present:  # files of an older version
                if name not in named and any(pattern.fullmatch(name) for pattern in config.FILES):
                    changes.append(CommitOperationDelete(path_in_repo=name))
            return changes

        return hub.commit(
            f"the {config.NOUN} in {self.path}",
            repo_id,
            "dataset",
            operations,
            private=private,
            token=token,
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
        )

    def verify(self) -> None:
        """Compares all open files with their checksums; raises a DatastoreError if one differs."""
        self._open_part.check_files(self.path)

    @property
    def _open_part(self) -> FolderConfig:
        """The part of the config that is open."""
        return self._part(self.config, *self._arguments)

    def _damaged(self, entry: FileEntry, reason: str) -> DatastoreError:
        return DatastoreError(f"{self.path / entry.name} is damaged: {reason}")

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises a DatastoreError for a tokenizer that the folder was not made for."""
        self.config.check_tokenizer(self.path, tokenizer)


def _read_card(folder: Path) -> bytes | None:
    """The content of the folder's README.md, if there is one."""
    path = folder / hub.CARD
    # A link could publish any file of this machine, for the card has no checksum. Only links of the
    # Hub's cache to files of the cache are followed.
    if path.is_symlink() and re.fullmatch(_LINK_TO_BLOB, os.readlink(path)):
        path = folder / os.readlink(path)
    if path.is_symlink():
        raise DatastoreError(f"{path} is a link, which is not followed; put the file itself there")
    return read_small(path, _LARGEST_CARD) if path.exists() else None
