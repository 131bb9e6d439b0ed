"""What is whole of a build, noted in progress.json, from where one that was killed can go on."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..folder import DatastoreError, FileEntry, ShardEntry, sync_folder

PROGRESS = "progress.json"


@dataclass
class BuildProgress:
    """How far a build or an extension is, as progress.json says it.

    Attributes:
        options (`dict`): What it was started with.
        documents (`int`): Documents of the source that are done with.
        entries (`int`): Entries of the next one that the shards have.
        shards (`list[ShardEntry]`): Those that are whole.
    """

    options: dict[str, Any]
    documents: int = 0
    entries: int = 0
    shards: list[ShardEntry] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Writes it to the disk; an earlier progress.json is replaced in one go."""
        new = folder / f".{PROGRESS}.new"
        with open(new, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, folder / PROGRESS)
        sync_folder(folder)

    @classmethod
    def read(cls, folder: Path) -> BuildProgress | None:
        """What progress.json says, `None` if there is none.

        Raises:
            DatastoreError: If the shards that it names are not there.
        """
        try:
            content = json.loads((folder / PROGRESS).read_bytes())
            content["shards"] = [
                ShardEntry(
                    tokens=shard["tokens"],
                    documents=shard["documents"],
                    tokens_file=FileEntry(**shard["tokens_file"]),
                    suffixes_file=FileEntry(**shard["suffixes_file"]),
                )
                for shard in content["shards"]
            ]
            progress = cls(**content)
            for file in progress.files():
                if (folder / file.name).stat().st_size != file.size:
                    raise ValueError(f"{file.name} has another size")
            return progress
        except FileNotFoundError as error:
            if error.filename == str(folder / PROGRESS):
                return None
            damage: Exception = error
        except (ValueError, KeyError, TypeError) as error:
            damage = error
        raise DatastoreError(f"{folder} cannot be resumed ({damage}); start again without resume")

    def files(self) -> list[FileEntry]:
        """The files of the shards that are whole."""
        return [file for shard in self.shards for file in (shard.tokens_file, shard.suffixes_file)]


def resumed(folder: Path, options: dict[str, Any]) -> BuildProgress:
    """What an earlier build left, or the beginning.

    Args:
        folder (`Path`): Where it was being written.
        options (`dict`): What the build is started with now.

    Raises:
        DatastoreError: If it was begun with other options, or what it left is damaged.
    """
    progress = BuildProgress.read(folder)
    if progress is None:
        return BuildProgress(options)
    for name in {**progress.options, **options}:
        before, now = progress.options.get(name), options.get(name)
        if before != now:
            raise DatastoreError(
                f"{folder} was begun with {name} {before!r}, not {now!r}; resume with the same "
                "options, or start again without resume"
            )
    return progress
