"""Builds a datastore: documents are tokenised, packed into shards, sorted, written and merged."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...check_count import check_count
from ...version import __version__
from ..datastore_config import LARGEST_SHARD, ShardEntry, StoreConfig
from ..files import DatastoreError, FileEntry
from ..fingerprint import check_tokenizer, public_name, tokenizer_fingerprint, vocabulary_size
from ..folder import delete, new_folder, only_writer, sweep
from ..shards import map_tokens, split_documents
from ..tokenizer_file import TokenizerError, write_tokenizer
from .display import BuildDisplay
from .engine import Engine, make_engine
from .merge import merge_all, merge_due
from .progress import PROGRESS, BuildProgress
from .shard_writer import ShardWriter
from .source import Source, open_source
from .tokenizing import TokenBatch

_OURS = re.compile(
    r"\.?(tokens|suffixes)-\d{5,}\.safetensors(\.new)?|\.(config|progress)\.json\.new"
    r"|\.?ngrams(-[0-9a-f]{12})?\.safetensors(\.new)?|\.tokenizer\.json\.new"
)

# What a datastore was built with is not repeated if it is less: small shards are files to write,
# and save hardly any memory.
LEAST_NOTED = 1 << 16


@dataclass(frozen=True)
class BuildOptions:
    """How documents become shards.

    Args:
        column (`str`, *optional*): A dataset's column. By default `"text"`, the only column of
            strings, or one with chats.
        pattern (`str`, *optional*, defaults to `"*"`): Which files below a folder, as `"*.py"`.
        shard_tokens (`int`, *optional*): Entries of a shard. Memory grows with it, about 12 bytes
            for each. By default 32,000,000; of an extension, as the datastore was built.
        num_proc (`int`, *optional*): Threads (or Ray tasks) that tokenise. By default one for each
            usable core.
        deduplicate (`bool`, *optional*, defaults to `False`): Drop exact repetitions of documents,
            and documents that are in the datastore already.
        resume (`bool`, *optional*, defaults to `False`): Go on with what an earlier build of the
            same source left, if it left something.
        engine (`str`, *optional*, defaults to `"local"`): `"local"`, or `"ray"` to tokenise and
            sort on a Ray cluster.
        progress (`bool`, *optional*, defaults to `True`): Show the progress on a terminal or in a
            notebook.

    Raises:
        ValueError: If a number is out of its bounds.
    """

    column: str | None = None
    pattern: str = "*"
    shard_tokens: int = 32_000_000
    num_proc: int | None = None
    deduplicate: bool = False
    resume: bool = False
    engine: str = "local"
    progress: bool = True

    def __post_init__(self) -> None:
        count = self.shard_tokens
        if not isinstance(count, int) or not 1 <= count <= LARGEST_SHARD:
            raise ValueError(f"shard_tokens must be from 1 to {LARGEST_SHARD}, but is {count!r}")
        if self.num_proc is not None:
            check_count("num_proc", self.num_proc, " or None")


def build_store(
    source: Any,
    tokenizer: PreTrainedTokenizerBase,
    path: str | os.PathLike,
    *,
    license: str | None = None,
    corpus: str | None = None,
    **options: Any,
) -> Path:
    """Builds a datastore in a new folder.

    Until it is whole it is in `.<name>.hf_refspec-build` beside its path. If the build is killed,
    that stays until the next one at this path; if it fails, it is deleted, unless `resume` is set.

    Args:
        source: A `datasets` dataset (map-style or streaming) with a column of texts or chats; a
            text file, a folder, or a list of both; or an iterable of texts or of lists of ids.
        tokenizer (`PreTrainedTokenizerBase`): The target model's, a fast one.
        path (`str` or `os.PathLike`): The folder to make.
        license (`str`, *optional*): Of the corpus. By default what the dataset says.
        corpus (`str`, *optional*): What the corpus is called. By default the dataset or the folder.
        options: As of [`BuildOptions`].

    Returns:
        `Path`: The folder.

    Raises:
        FileExistsError: If there is something at `path`.
        ValueError: If the source has no tokens, or something that is no document.
        DatastoreError: If another process is building it, or what is left cannot be resumed.
        OSError: If it cannot be written.
    """
    chosen = BuildOptions(**options)
    config = StoreConfig(
        fingerprint=tokenizer_fingerprint(tokenizer),
        tokenizer=public_name(tokenizer),
        vocab_size=vocabulary_size(tokenizer),
    )
    opened = open_source(source, tokenizer, config.vocab_size, chosen.column, chosen.pattern)
    opened.name = corpus or opened.name
    engine = make_engine(chosen.engine, chosen.num_proc, config, tokenizer)
    with new_folder(Path(path), chosen.resume) as folder:
        progress = _add_shards(folder, config, opened, engine, chosen)
        shards = merge_due(folder, config, progress.shards, chosen.num_proc, chosen.progress)
        progress.shards = shards
        progress.write(folder)  # If it is killed, it goes on without what is deleted now.
        sweep(folder, _OURS, (file.name for file in progress.files()))
        about = {
            "corpus": opened.name,
            "license": license or opened.license,
            "deduplicated": chosen.deduplicate,
            "shard_tokens": chosen.shard_tokens,
            "hf_refspec": __version__,
            "documents": sum(shard.documents for shard in shards),
        }
        tokenizer_file = write_tokenizer(folder, tokenizer)
        config = replace(config, source=about, shards=shards, tokenizer_file=tokenizer_file)
        config.write(folder)
        (folder / PROGRESS).unlink()
    return Path(path)


def extend_store(
    folder: str | os.PathLike, more: Any, tokenizer: PreTrainedTokenizerBase, **options: Any
) -> Path:
    """Adds documents to a datastore, in new shards after those that it has.

    What has grown to about the size of the shards before it is merged with them, in new files. The
    config.json is replaced at the end in one go: whoever has the datastore open goes on, and if the
    extension fails or is killed it is what it was.

    Args:
        folder (`str` or `os.PathLike`): The datastore.
        more: What to add, as `source` in [`build_store`].
        tokenizer (`PreTrainedTokenizerBase`): The one that it was built with.
        options: As of [`BuildOptions`].

    Returns:
        `Path`: The folder.

    Raises:
        ValueError: If there is nothing to add, or something that is no document.
        DatastoreError: If the datastore cannot be read, is for another tokenizer, has only the
            compact form, or another process is writing it.
        OSError: If the shards cannot be written.
    """
    folder = Path(folder)
    config = StoreConfig.read(folder)
    remedy = f"it cannot be extended with {public_name(tokenizer)}"
    check_tokenizer(folder, config, tokenizer, remedy)
    if options.get("shard_tokens") is None:
        noted = config.source.get("shard_tokens")
        # `source` is for people: nobody has checked what it says.
        largest = max([BuildOptions.shard_tokens, *(shard.tokens for shard in config.shards)])
        is_size = type(noted) is int and LEAST_NOTED <= noted <= largest
        options["shard_tokens"] = noted if is_size else BuildOptions.shard_tokens
    chosen = BuildOptions(**options)
    opened = open_source(more, tokenizer, config.vocab_size, chosen.column, chosen.pattern)
    engine = make_engine(chosen.engine, chosen.num_proc, config, tokenizer)
    with only_writer(folder):
        config = StoreConfig.read(folder)
        if not config.shards:
            raise DatastoreError(
                f"{folder} has only the compact form; extend the datastore that it was made from"
            )
        try:
            if not (chosen.resume and _is_extended(folder, config, _noted(opened, chosen))):
                new = _add_shards(folder, config, opened, engine, chosen).shards
                shards = [*config.shards, *new]
                shards = merge_due(folder, config, shards, chosen.num_proc, chosen.progress)
                _extended(config, shards, opened.name, chosen.deduplicate).write(folder)
            (folder / PROGRESS).unlink()
            _sweep(folder)
        except BaseException as error:
            if not chosen.resume:
                _sweep(folder)
                delete(folder / PROGRESS)
            if isinstance(error, TokenizerError):
                raise DatastoreError(f"{folder} cannot be extended: {error}") from None
            raise
    return folder


def merge_store(folder: str | os.PathLike, num_proc: int | None = None, show: bool = True) -> Path:
    """Merges all shards of a datastore into as few as can be, see [`Datastore.merge`].

    Args:
        folder (`str` or `os.PathLike`): The datastore.
        num_proc (`int`, *optional*): Threads that merge. By default one for each usable core.
        show (`bool`, *optional*, defaults to `True`): Show the progress on a terminal.

    Returns:
        `Path`: The folder.

    Raises:
        DatastoreError: If it is damaged, has only the compact form, or another process is writing
            it.
        OSError: If the merged shards cannot be written; the datastore is as it was.
    """
    folder = Path(folder)
    with only_writer(folder):
        config = StoreConfig.read(folder)
        if not config.shards:
            raise DatastoreError(f"{folder} has only the compact form, which is not made of shards")
        progress = BuildProgress.read(folder)  # of an extension that may be resumed
        kept = progress.files() if progress else []
        _sweep(folder, kept)  # of merges that were killed
        try:
            shards = merge_all(folder, config, num_proc, show)
            if shards != config.shards:
                replace(config, shards=shards).write(folder)
        finally:
            _sweep(folder, kept)
    return folder


def _sweep(folder: Path, kept: Iterable[FileEntry] = ()) -> None:
    """Deletes the shards that config.json does not name (any more), except those to be kept."""
    files = [*StoreConfig.read(folder).files(), *kept]
    sweep(folder, _OURS, (file.name for file in files))


def _noted(source: Source, options: BuildOptions) -> dict[str, Any]:
    """What must be the same if a build is resumed."""
    return {
        "corpus": source.name,
        "deduplicated": options.deduplicate,
        "shard_tokens": options.shard_tokens,
        "hf_refspec": __version__,
        "column": options.column,
        "pattern": options.pattern,
    }


def _extended(
    config: StoreConfig, shards: list[ShardEntry], corpus: str, deduplicated: bool
) -> StoreConfig:
    about = dict(config.source)
    if corpus not in str(about.get("corpus", "")):
        about["corpus"] = f"{about['corpus']}, {corpus}" if about.get("corpus") else corpus
    about["deduplicated"] = bool(about.get("deduplicated")) and deduplicated
    about["documents"] = sum(shard.documents for shard in shards)
    return replace(config, source=about, shards=shards)


def _is_extended(folder: Path, config: StoreConfig, noted: dict[str, Any]) -> bool:
    """Whether this extension was killed after config.json named its shards."""
    progress = BuildProgress.read(folder)
    if progress is None or not progress.shards:
        return False
    before = _tokens(config.shards) - _tokens(progress.shards)  # whatever has been merged since
    return (noted | {"tokens before": before}).items() <= progress.options.items()


def _tokens(shards: Iterable[ShardEntry]) -> int:
    return sum(shard.tokens for shard in shards)


def _add_shards(
    folder: Path, config: StoreConfig, source: Source, engine: Engine, options: BuildOptions
) -> BuildProgress:
    """Writes a source's documents into new shards, which config.json does not name yet; returns
    what names them and those of the build that is resumed."""
    noted = _noted(source, options) | {
        "tokenizer fingerprint": config.fingerprint,
        "tokens before": _tokens(config.shards),
    }
    progress = BuildProgress.begun(folder, noted, options.resume)
    sweep(folder, _OURS, (file.name for file in [*config.files(), *progress.files()]))
    progress.write(folder)
    digests = None
    if options.deduplicate:
        shards = [*config.shards, *progress.shards]
        stored = (map_tokens(folder, config, shard) for shard in shards)
        digests = set(map(_digest, split_documents(stored, config.separator)))
    batches = engine.tokenize(source, progress.documents)
    try:
        with (
            BuildDisplay(options.progress, source.total, progress) as display,
            ShardWriter(
                folder, config, options.shard_tokens, engine.sort, progress, display
            ) as writer,
        ):
            _add_documents(writer, batches, digests)
    finally:
        engine.close()
    if not progress.shards:
        kind = "that the datastore does not have" if config.shards else "with a token"
        raise ValueError(f"source has no document {kind}")
    return progress


def _add_documents(
    writer: ShardWriter, batches: Iterator[TokenBatch], digests: set[bytes] | None
) -> None:
    """Adds documents to the shards, except those whose digest is known already."""
    number, skip = writer.progress.documents, writer.progress.entries
    others = DatastoreError("source has other documents than before; start again without resume")
    for lengths, tokens in batches:
        start = 0
        for length in lengths.tolist():
            document = tokens[start : start + length]
            start += length
            number += 1
            if skip >= max(length, 1):
                raise others
            if digests is not None and length:
                digest = _digest(document[:-1])
                if digest in digests and not skip:
                    continue
                digests.add(digest)
            writer.add(document, skip, number)
            skip = 0
        writer.display.has_read(len(lengths), len(tokens))
    if skip:
        raise others


def _digest(document: Any) -> bytes:
    return hashlib.blake2b(document.tobytes(), digest_size=16).digest()
