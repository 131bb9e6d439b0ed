"""What every stored folder can do once it is open: be checked, copied, published and fetched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from huggingface_hub import CommitInfo
from transformers import PreTrainedTokenizerBase

from .files import DatastoreError, check_file, copy_file, unreadable
from .fingerprint import check_tokenizer
from .folder import FolderConfig, new_folder
from .hub import Part, fetch, push

if TYPE_CHECKING:
    from typing_extensions import Self

C = TypeVar("C", bound=FolderConfig)


class StoredFolder(Generic[C]):
    """A folder that is open: [`Datastore`], [`KnowledgeBase`] or [`KnnDatastore`].

    Attributes:
        path (`Path`): The folder.
        config ([`FolderConfig`]): What its config.json says.
    """

    config_type: ClassVar[type[FolderConfig]]
    remedy: ClassVar[str] = "build one"
    path: Path
    config: C

    def __init__(self, path: str | os.PathLike, *args: Any, **options: Any) -> None:
        self.path = Path(path)
        self.config_type.opened(self.path, self._open)

    def _open(self, config: C) -> None:
        """Opens the files that a config names; called again if they are gone and it is replaced."""
        raise NotImplementedError

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
            args, options: The other arguments of the class, as the tokenizer.

        Raises:
            OSError: If there is no such folder or repo, or it cannot be reached.
            DatastoreError: As the class.
        """
        download = {"token": token, "cache_dir": cache_dir}
        part = cls._part(*args, **options)
        folder = fetch(repo_or_path, cls.config_type, part, revision, local_files_only, **download)
        return cls(folder, *args, **options)

    @classmethod
    def _part(cls, *args: Any, **options: Any) -> Part[Any]:
        """Takes out of a config what is needed to open the folder with these arguments."""
        return lambda config: config

    def _open_part(self) -> FolderConfig:
        """What of the folder is open."""
        return self.config

    def save_pretrained(self, path: str | os.PathLike) -> None:
        """Copies all of it that is open into a new folder.

        Raises:
            FileExistsError: If there is something at `path`.
            DatastoreError: If a file is not as it was written.
            OSError: If it cannot be written.
        """
        config = self._open_part()
        with self._reading(), new_folder(Path(path)) as folder:
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
        """Publishes the folder as a dataset repo, in one commit, with a card.

        The folder's README.md is the card; where there is none, one is generated.

        Args:
            repo_id (`str`): Such as `"org/store"`; the repo is created if there is none.
            private (`bool`, *optional*): Whether a new repo is private; by default as the owner of
                the account has set it.
            token (`str` or `bool`, *optional*): As in `huggingface_hub`.
            commit_message (`str`, *optional*): The first line of the commit's message.
            revision (`str`, *optional*): A branch; it is created if there is none.
            create_pr (`bool`, *optional*, defaults to `False`): Whether to open a pull request
                instead of changing the branch.

        Returns:
            `huggingface_hub.CommitInfo`: The commit.

        Raises:
            DatastoreError: If a file is not as it was written.
            OSError: If the repo cannot be written; it is never left half changed.
        """
        return push(
            self.path,
            self.config_type,
            repo_id,
            private,
            token,
            commit_message,
            revision,
            create_pr,
        )

    def verify(self) -> None:
        """Reads all files that are open and compares them with their checksums.

        Raises:
            DatastoreError: If a file is not as it was written.
        """
        with self._reading():
            for entry in self._open_part().files():
                check_file(self.path, entry)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """What is read of an open folder later can have been replaced: this says so then."""
        try:
            yield
        except DatastoreError as error:
            if not self._is_replaced():
                raise
            raise DatastoreError(
                f"{self.path} has been changed by another process since it was opened; open it "
                f"again ({error})"
            ) from None
        except MemoryError as error:
            raise unreadable(self.path, error) from None

    def _is_replaced(self) -> bool:
        try:
            return self.config_type.read(self.path) != self.config
        except DatastoreError:
            return False

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuses a tokenizer that the folder was not made for.

        Raises:
            DatastoreError: If it is another one.
        """
        check_tokenizer(self.path, self.config, tokenizer, f"{self.remedy} for this tokenizer")
