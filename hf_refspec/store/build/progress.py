"""The progress of a build, in progress.json, from which a killed build is resumed."""

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
    """The state of a build or an extension.

    Attributes:
        options (`dict`): Its options.
        documents (`int`): Documents of the source that are in the shards.
        entries (`int`): Entries of the next document that are in the shards.
        shards (`list[ShardEntry]`): The complete shards.
    """

    options: dict[str, Any]
    documents: Annotated[int, _COUNT] = 0
    entries: Annotated[int, _COUNT] = 0
    shards: Annotated[list[ShardEntry], AtMost(MOST_SHARDS)] = field(default_factory=list)

    def files(self) -> list[FileEntry]:
        """The files of the complete shards."""
        return list(values_of(FileEntry, self))

    def write(self, folder: Path) -> None:
        """Writes progress.json, or replaces it atomically."""
        write_json(folder / PROGRESS, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> BuildProgress | None:
        """Reads progress.json, if there is one; raises a DatastoreError if it is damaged, or a
        shard that it names is missing."""
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
        """The progress of an earlier build if there is one to resume, else an empty one; raises a
        DatastoreError as `read`, or if the earlier build had other options."""
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
