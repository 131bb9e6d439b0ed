"""Documents that have names: which ones, numbered over all shards, in a file of the datastore."""

from __future__ import annotations

import json
from bisect import bisect
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from .files import DatastoreError, FileEntry, blocks_of, write_bytes
from .folder import sync_folder


@dataclass
class DocumentNames:
    """Each name with the number of its document and a checksum of its tokens; and the numbers of
    documents without a name any more, which leave the shards when they are next rewritten."""

    documents: dict[str, tuple[int, str]] = field(default_factory=dict)
    leaving: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path, entry: FileEntry | None) -> DocumentNames:
        """Reads the file; raises a DatastoreError if it is not as it was written."""
        if entry is None:
            return cls()
        content = b"".join(blocks_of(folder, entry))
        try:
            documents, leaving = json.loads(content)
            found = {str(name): (int(at), str(digest)) for name, (at, digest) in documents.items()}
            return cls(found, sorted({int(number) for number in leaving}))
        except (AttributeError, OverflowError, RecursionError, TypeError, ValueError):
            path = folder / entry.name
            raise DatastoreError(f"{path} is damaged: it has no names of documents") from None

    def write(self, folder: Path) -> FileEntry | None:
        """Writes them into a new file, if there are any."""
        if not self.documents and not self.leaving:
            return None
        content = json.dumps([self.documents, self.leaving]).encode()
        written = write_bytes(folder / f"names-{sha256(content).hexdigest()[:12]}.json", content)
        sync_folder(folder)
        return written

    def put(self, name: str, number: int, digest: str | None) -> bool:
        """Gives a document a name, and takes it from the one that had it; `None` is the checksum of
        an empty document, which is not kept. Returns whether the document is to be stored."""
        old = self.documents.get(name)
        if old is not None and old[1] == digest:
            return False
        if old is not None:
            self.leaving.append(self.documents.pop(name)[0])
        if digest is not None:
            self.documents[name] = number, digest
        return digest is not None

    def left(self) -> DocumentNames:
        """The names once the documents that leave have left."""
        gone = sorted(self.leaving)
        kept = self.documents.items()
        return DocumentNames({name: (at - bisect(gone, at), digest) for name, (at, digest) in kept})
