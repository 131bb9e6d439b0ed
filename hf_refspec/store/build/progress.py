"""The progress of a build, in progress.json, from which a build that was killed is resumed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from reprlib import repr as short
from typing import Annotated, Any

from ..datastore_config import MOST_SHARDS, ShardEntry
from ..files import DatastoreError, FileEntry, open_entry, open_file
from ..folder import LARGEST_JSON, write_json
from ..printable import printable
from ..schema import AtMost, Range, parse, values_of

PROGRESS = "progress.json"
_COUNT = Range(0, 2**62)


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
    documents: Annotated[int, _COUNT] = 0
    entries: Annotated[int, _COUNT] = 0
    shards: Annotated[list[ShardEntry], AtMost(MOST_SHARDS)] = field(default_factory=list)

    def files(self) -> list[FileEntry]:
        """The files of the shards that are whole."""
        return list(values_of(FileEntry, self))

    def write(self, folder: Path) -> None:
        """Writes it to the disk; an earlier progress.json is replaced in one go."""
        write_json(folder / PROGRESS, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> BuildProgress | None:
        """What progress.json says, `None` if there is none.

        Raises:
            DatastoreError: If the shards that it names are not there.
        """
        try:
            with open_file(folder / PROGRESS, follow_links=False) as file:
                progress = parse(cls, json.loads(file.read(LARGEST_JSON)))
            for entry in progress.files():
                open_entry(folder, entry, follow_links=False).close()
            return progress
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, RecursionError) as error:
            raise DatastoreError(
                f"{folder} cannot be resumed ({error}); start again without resume"
            ) from None

    @classmethod
    def begun(cls, folder: Path, options: dict[str, Any], resume: bool) -> BuildProgress:
        """What an earlier build with the same options left if it is to be resumed, else the start.

        Raises:
            DatastoreError: If it was begun with other options, or what it left is damaged.
        """
        progress = cls.read(folder) if resume else None
        if progress is None:
            return cls(options)
        for name in {**progress.options, **options}:
            before, now = progress.options.get(name), options.get(name)
            if before != now:
                raise DatastoreError(
                    f"{folder} was begun with {printable(name)} {short(before)}, not {short(now)}; "
                    "resume with the same options, or start again without resume"
                )
        return progress
