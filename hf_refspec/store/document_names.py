"""Which documents have names: a JSON object in a file of the datastore."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

from .files import DatastoreError, FileEntry, blocks_of, write_bytes
from .folder import sync_folder

# By its name the number of a document, counted over all shards, and a checksum of its tokens.
DocumentNames: TypeAlias = dict[str, tuple[int, str]]


def read_names(folder: Path, entry: FileEntry | None) -> DocumentNames:
    """Reads the names of documents; raises a DatastoreError if the file is damaged."""
    if entry is None:
        return {}
    content = b"".join(blocks_of(folder, entry))
    try:
        found = json.loads(content)
        return {
            name: (range(1 << 62)[number], str(digest)) for name, (number, digest) in found.items()
        }
    except (AttributeError, IndexError, RecursionError, TypeError, ValueError):
        raise DatastoreError(f"{folder / entry.name} is damaged: it has other values") from None


def write_names(folder: Path, names: DocumentNames) -> FileEntry | None:
    """Writes the names into a new file, if there are any."""
    if not names:
        return None
    content = json.dumps(names).encode()
    entry = write_bytes(folder / f"names-{sha256(content).hexdigest()[:12]}.json", content)
    sync_folder(folder)
    return entry
