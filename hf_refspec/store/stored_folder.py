"""The stored folder: a config.json that names all its files, and the operations on them.

    config.json       what the folder is, and its files with sizes and checksums
    *.safetensors     its arrays, memory-mapped
    README.md         the card, on the Hub

Datastores, knowledge bases, kNN datastores and recycling tables are such folders. A file never
changes once config.json names it, and config.json is replaced atomically: a process that has the
folder open is not disturbed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    TypeVar,
)

from huggingface_hub import CommitInfo
from transformers import PreTrainedTokenizerBase

from ..corpus.untrusted import DatastoreError
from ..notebooks import html_table
from . import hub
from .files import (
    FileEntry,
    copy_file,
    new_folder,
)
from .folder_config import FolderConfig

if TYPE_CHECKING:
    from typing_extensions import Self

C = TypeVar("C", bound=FolderConfig)
T = TypeVar("T")


class StoredFolder(Generic[C]):
    """A folder that is open: [`Datastore`], [`KnowledgeBase`] or [`KnnDatastore`].

    Attributes:
        path (`Path`): The folder.
        config ([`FolderConfig`]): Its config.json.
    """

    config_type: ClassVar[type[Any]]
    remedy: ClassVar[str] = "build one"
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
        folder = hub.fetch(
            repo_or_path,
            cls.config_type,
            lambda config: cls._part(config, *args, **options),
            revision,
            local_files_only,
            token=token,
            cache_dir=cache_dir,
        )
        return cls(folder, *args, **options)

    @classmethod
    def _part(cls, config: Any, *_: Any, **__: Any) -> Any:
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
            repo_id (`str`): Such as `"org/store"`; the repo is created if there is none. Without an
                owner it is yours.
            private (`bool`, *optional*): Makes a new repo private; by default as the owner of the
                account has set it.
            token (`str` or `bool`, *optional*): As in `huggingface_hub`.
            commit_message (`str`, *optional*): The first line of the commit's message.
            revision (`str`, *optional*): A branch; it is created if there is none.
            create_pr (`bool`, *optional*, defaults to `False`): Open a pull request instead of
                changing the branch.

        Raises:
            ValueError: If `repo_id` is not a name for a repo.
            DatastoreError: If a file is damaged.
            OSError: If the repo cannot be written; it is never left half changed.
        """
        return hub.push(
            self.path,
            self.config_type,
            repo_id,
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
        part: FolderConfig = self._part(self.config, *self._arguments)
        return part

    def _damaged(self, entry: FileEntry, reason: str) -> DatastoreError:
        return DatastoreError(f"{self.path / entry.name} is damaged: {reason}")

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises a DatastoreError for a tokenizer that the folder was not made for."""
        self.config.check_tokenizer(self.path, tokenizer, f"{self.remedy} for this tokenizer")
