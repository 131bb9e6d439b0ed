"""Builds a datastore: documents are tokenised, packed into shards, sorted and written."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...version import __version__
from ..fingerprint import tokenizer_fingerprint, vocabulary_size
from ..folder import (
    LARGEST_SHARD,
    LOCK,
    DatastoreError,
    FileEntry,
    ShardEntry,
    StoreConfig,
    only_writer,
    read_arrays,
    sync_folder,
)
from .local_engine import LocalEngine
from .progress import PROGRESS, BuildProgress, resumed
from .shard_writer import ProgressBars, ShardWriter
from .source import Source, open_source
from .tokenizing import TokenBatch

_OURS = re.compile(
    r"\.?(tokens|suffixes)-\d{5,}\.safetensors(\.new)?|\.(config|progress)\.json\.new"
    r"|\.?ngrams(-[0-9a-f]{12})?\.safetensors(\.new)?"
)


def build_store(
    source: Any,
    tokenizer: PreTrainedTokenizerBase,
    path: str | os.PathLike,
    *,
    column: str | None = None,
    pattern: str = "*",
    shard_tokens: int = 32_000_000,
    num_proc: int | None = None,
    deduplicate: bool = False,
    resume: bool = False,
    engine: str = "local",
    license: str | None = None,
    corpus: str | None = None,
    progress: bool = True,
) -> Path:
    """Builds a datastore in a new folder.

    Until it is whole it is `<path>.partial`. If the build is killed, that stays; if it fails, it is
    deleted, unless `resume` is set.

    Args:
        source: A `datasets` dataset (map-style or streaming) with a column of texts or chats; a
            text file, a folder, or a list of both; or an iterable of texts or of lists of ids.
        tokenizer (`PreTrainedTokenizerBase`): The target model's, a fast one.
        path (`str` or `os.PathLike`): The folder to make.
        column (`str`, *optional*): The dataset's column. By default `"text"`, the only column of
            strings, or one with chats.
        pattern (`str`, *optional*, defaults to `"*"`): Which files below a folder, as `"*.py"`.
        shard_tokens (`int`, *optional*, defaults to 32,000,000): Entries of a shard. Memory grows
            with it, about 12 bytes for each.
        num_proc (`int`, *optional*): Processes that tokenise. By default one for each usable core.
        deduplicate (`bool`, *optional*, defaults to `False`): Drop exact repetitions of documents.
        resume (`bool`, *optional*, defaults to `False`): Go on with what an earlier build of the
            same source left, if it left something.
        engine (`str`, *optional*, defaults to `"local"`): `"local"`, or `"ray"` to tokenise and
            sort on a Ray cluster.
        license (`str`, *optional*): Of the corpus. By default what the dataset says.
        corpus (`str`, *optional*): What the corpus is called. By default the dataset or the folder.
        progress (`bool`, *optional*, defaults to `True`): Show progress bars.

    Returns:
        `Path`: The folder.

    Raises:
        FileExistsError: If there is something at `path`.
        ValueError: If the source has no tokens, or something that is no document.
        DatastoreError: If another process is building it, or what is left cannot be resumed.
        OSError: If it cannot be written.
    """
    path = Path(path)
    _check_free(path)
    config = StoreConfig(
        fingerprint=tokenizer_fingerprint(tokenizer),
        tokenizer=_tokenizer_name(tokenizer),
        vocab_size=vocabulary_size(tokenizer),
    )
    opened = open_source(source, tokenizer, config.vocab_size, column, pattern)
    about = {
        "corpus": corpus or opened.name,
        "license": license or opened.license,
        "deduplicated": deduplicate,
        "shard_tokens": shard_tokens,
        "hf_refspec": __version__,
    }
    options = {**about, "column": column, "pattern": pattern}
    workers = make_engine(engine, tokenizer, config, num_proc)
    partial = path.with_name(f"{path.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    with only_writer(partial):
        try:
            _check_free(path)
            shards = _add_shards(partial, config, opened, workers, options, resume, progress)
            about["documents"] = sum(shard.documents for shard in shards)
            replace(config, source=about, shards=shards).write(partial)
            (partial / PROGRESS).unlink()
            sync_folder(partial)
            os.rename(partial, path)
            sync_folder(path.parent)
            (path / LOCK).unlink(missing_ok=True)
        except BaseException:
            if not resume:
                shutil.rmtree(partial, ignore_errors=True)
            raise
    return path


def extend_store(
    folder: str | os.PathLike,
    more: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    column: str | None = None,
    pattern: str = "*",
    shard_tokens: int | None = None,
    num_proc: int | None = None,
    deduplicate: bool = False,
    resume: bool = False,
    engine: str = "local",
    progress: bool = True,
) -> Path:
    """Adds documents to a datastore, in new shards after those that it has.

    No file of the datastore is touched but its config.json, which is replaced at the end in one go:
    whoever has it open goes on, and if the extension fails or is killed it is what it was.

    Args:
        folder (`str` or `os.PathLike`): The datastore.
        more: What to add, as `source` in [`build_store`].
        tokenizer (`PreTrainedTokenizerBase`): The one that it was built with.
        shard_tokens (`int`, *optional*): Entries of a new shard. By default as it was built.
        deduplicate (`bool`, *optional*, defaults to `False`): Drop documents that are in the
            datastore already, and exact repetitions among the new ones.
        resume (`bool`, *optional*, defaults to `False`): Go on with what an earlier extension with
            the same documents left, if it left something.
        column, pattern, num_proc, engine, progress: As in [`build_store`].

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
    fingerprint = tokenizer_fingerprint(tokenizer)
    if fingerprint != config.fingerprint:
        raise DatastoreError(
            f"{folder} was built with the tokenizer {config.tokenizer} (fingerprint "
            f"{config.fingerprint}) and cannot be extended with {_tokenizer_name(tokenizer)} "
            f"(fingerprint {fingerprint})"
        )
    if shard_tokens is None:
        shard_tokens = config.source.get("shard_tokens", 32_000_000)
    opened = open_source(more, tokenizer, config.vocab_size, column, pattern)
    options = {
        "corpus": opened.name,
        "deduplicated": deduplicate,
        "shard_tokens": shard_tokens,
        "hf_refspec": __version__,
        "column": column,
        "pattern": pattern,
    }
    workers = make_engine(engine, tokenizer, config, num_proc)
    with only_writer(folder):
        config = StoreConfig.read(folder)
        if not config.shards:
            raise DatastoreError(
                f"{folder} has only the compact form; extend the datastore that it was made from"
            )
        try:
            if not (resume and _is_extended(folder, config, options)):
                new = _add_shards(folder, config, opened, workers, options, resume, progress)
                _extended(config, new, opened.name, deduplicate).write(folder)
            (folder / PROGRESS).unlink()
        except BaseException:
            if not resume:
                _sweep(folder, StoreConfig.read(folder).files())
                (folder / PROGRESS).unlink(missing_ok=True)
            raise
    return folder


def _extended(
    config: StoreConfig, new: list[ShardEntry], corpus: str, deduplicated: bool
) -> StoreConfig:
    shards = [*config.shards, *new]
    about = dict(config.source)
    if corpus not in str(about.get("corpus", "")):
        about["corpus"] = f"{about['corpus']}, {corpus}" if about.get("corpus") else corpus
    about["deduplicated"] = bool(about.get("deduplicated")) and deduplicated
    about["documents"] = sum(shard.documents for shard in shards)
    return replace(config, source=about, shards=shards)


def _is_extended(folder: Path, config: StoreConfig, options: dict[str, Any]) -> bool:
    """Tells whether this extension was killed when all but its progress.json was done."""
    progress = BuildProgress.read(folder)
    if progress is None or not progress.shards or progress.shards[-1] not in config.shards:
        return False
    return options.items() <= progress.options.items()


def _check_free(path: Path) -> None:
    if os.path.lexists(path):
        raise FileExistsError(
            f"{path} exists already; choose another path, delete it, or extend the datastore in it"
        )


def _tokenizer_name(tokenizer: PreTrainedTokenizerBase) -> str:
    name = str(tokenizer.name_or_path or "")
    # Where it lies on this machine is of no use to others.
    return (Path(name).resolve().name if os.path.isdir(name) else name) or type(tokenizer).__name__


class Engine(Protocol):
    """Where the work is done."""

    def tokenize(self, source: Source, skip: int) -> Iterator[TokenBatch]:
        """Tokenises the documents of a source but the first `skip`, in order."""

    def sort(self, tokens: np.ndarray) -> np.ndarray:
        """Makes the suffix array of a shard."""

    def close(self) -> None:
        """Ends what it has started."""


def make_engine(
    name: str, tokenizer: PreTrainedTokenizerBase, config: StoreConfig, num_proc: int | None
) -> Engine:
    """Makes the engine of that name; nothing is started yet."""
    if num_proc is not None and num_proc < 1:
        raise ValueError(f"num_proc must be at least 1, but is {num_proc}")
    setup = (tokenizer.backend_tokenizer.to_str(), config.token_dtype, config.separator)
    if name == "local":
        return LocalEngine(*setup, num_proc)
    if name == "ray":
        from .ray_engine import RayEngine

        return RayEngine(*setup, config.vocab_size, num_proc)
    raise ValueError(f"engine must be 'local' or 'ray', but is {name!r}")


def _sweep(folder: Path, keep: list[FileEntry]) -> None:
    """Deletes the files of shards that are not to be kept, and what was not written to its end."""
    names = {file.name for file in keep}
    for file in folder.iterdir():
        if _OURS.fullmatch(file.name) and file.name not in names:
            file.unlink()


def _add_shards(
    folder: Path,
    config: StoreConfig,
    source: Source,
    engine: Engine,
    options: dict[str, Any],
    resume: bool,
    show_progress: bool,
) -> list[ShardEntry]:
    """Writes a source's documents into new shards, which config.json does not name yet.

    Returns:
        `list[ShardEntry]`: The new shards, those of an earlier attempt among them.
    """
    shard_tokens = options["shard_tokens"]
    if not isinstance(shard_tokens, int) or not 1 <= shard_tokens <= LARGEST_SHARD:
        raise ValueError(f"shard_tokens must be from 1 to {LARGEST_SHARD}, but is {shard_tokens!r}")
    options = {**options, "tokenizer fingerprint": config.fingerprint}
    options["shards before"] = len(config.shards)
    progress = resumed(folder, options) if resume else BuildProgress(options)
    _sweep(folder, [*config.files(), *progress.files()])
    progress.write(folder)
    digests = None
    if options["deduplicated"]:
        digests = set(_stored_digests(folder, config, [*config.shards, *progress.shards]))
    bars = ProgressBars(show_progress, source.total, progress)
    try:
        with ShardWriter(folder, config, shard_tokens, engine.sort, progress, bars) as writer:
            number, skip = progress.documents, progress.entries
            for lengths, tokens in engine.tokenize(source, number):
                start = 0
                for length in lengths.tolist():
                    document = tokens[start : start + length]
                    start += length
                    number += 1
                    if skip >= max(length, 1):
                        raise DatastoreError(_OTHER_SOURCE)
                    if digests is not None and length:
                        digest = _digest(document)
                        if digest in digests and not skip:
                            continue
                        digests.add(digest)
                    writer.add(document, skip, number)
                    skip = 0
                bars.documents.update(len(lengths))
                bars.tokens.update(len(tokens))
            if skip:
                raise DatastoreError(_OTHER_SOURCE)
    finally:
        engine.close()
        bars.close()
    if not progress.shards:
        kind = "that the datastore does not have" if config.shards else "with a token"
        raise ValueError(f"source has no document {kind}")
    return progress.shards


_OTHER_SOURCE = "source has other documents than before; start again without resume"


def _digest(document: np.ndarray) -> bytes:
    return hashlib.blake2b(document.tobytes(), digest_size=16).digest()


def _stored_digests(folder: Path, config: StoreConfig, shards: list[ShardEntry]) -> Iterator[bytes]:
    """The digests of the documents that end in the shards."""
    begun = np.empty(0, config.token_dtype)
    for shard in shards:
        expected: dict[str, tuple[np.dtype, int | None]]
        expected = {"tokens": (config.token_dtype, shard.tokens)}
        tokens = read_arrays(folder, shard.tokens_file, expected)["tokens"]
        ends = np.flatnonzero(tokens == config.separator) + 1
        documents = np.split(tokens, ends)
        documents[0] = np.concatenate([begun, documents[0]])
        begun = documents.pop()
        yield from map(_digest, documents)
