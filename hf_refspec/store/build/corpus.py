"""Builds a datastore: documents are tokenised, packed into shards, sorted, written and merged."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ...check_count import check_count
from ...version import __version__
from ..datastore_config import ARRAY_FILES, LARGEST_SHARD, ShardEntry, StoreConfig
from ..files import DatastoreError, FileEntry
from ..fingerprint import public_name, vocabulary_size
from ..folder import delete, new_folder, only_writer, sweep
from ..shards import map_tokens, split_documents
from ..tokenizer_file import TokenizerError, write_tokenizer
from .engine import Engine, make_engine
from .merge import merge_all, merge_due, token_count
from .packing import document_digest, first_tokens, packed_documents, write_shards
from .progress import PROGRESS, BuildProgress
from .source import Source, after, open_source

# Smaller shards are more files, and save hardly any memory.
LEAST_NOTED = 1 << 16


@dataclass(frozen=True)
class BuildOptions:
    """How documents are made into shards.

    Args:
        column (`str`, *optional*): A dataset's column. By default that of its chats, `"text"`,
            `"content"`, `"prompt"` with `"completion"`, or the only one of texts.
        pattern (`str`, *optional*, defaults to `"*"`): Which files below a folder, as `"*.py"`.
        max_tokens (`int`, *optional*): Stop after the document that reaches so many tokens.
        shard_tokens (`int`, *optional*): Entries of a shard, each of which takes about 12 bytes of
            memory. By default 32,000,000; for an extension, as the datastore was built.
        num_proc (`int`, *optional*): Threads (or Ray tasks) that tokenise. By default one for each
            usable core.
        deduplicate (`bool`, *optional*, defaults to `False`): Drop exact repetitions of documents,
            and documents that are in the datastore already.
        resume (`bool`, *optional*, defaults to `False`): Continue an earlier build of the same
            source that was stopped, if there is one.
        engine (`str`, *optional*, defaults to `"local"`): `"local"`, or `"ray"` to tokenise and
            sort on a Ray cluster.
        progress (`bool`, *optional*, defaults to `True`): Show the progress on a terminal or in a
            notebook.

    Raises:
        ValueError: If a number is out of its bounds.
    """

    column: str | None = None
    pattern: str = "*"
    max_tokens: int | None = None
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
        if self.max_tokens is not None:
            check_count("max_tokens", self.max_tokens, " or None")
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

    Until it is complete it is in `.<name>.hf_refspec-build` beside its path. A build that is killed
    leaves that to the next one at this path; one that fails deletes it, unless `resume` is set.

    Args:
        source: A `datasets` dataset (map-style or streaming) with a column of texts or chats; a
            text file, a folder, or a list of both; or an iterable of texts or of lists of ids.
        tokenizer (`PreTrainedTokenizerBase`): The target model's, a fast one.
        path (`str` or `os.PathLike`): The folder to make.
        license (`str`, *optional*): Of the corpus. By default the dataset's.
        corpus (`str`, *optional*): Its name. By default the dataset's or the folder's.
        options: As of [`BuildOptions`].

    Returns:
        `Path`: The folder.

    Raises:
        FileExistsError: If there is something at `path`.
        ValueError: If the source has no tokens, or an entry that is no document.
        DatastoreError: If another process is building it, or an earlier build cannot be resumed.
        OSError: If it cannot be written.
    """
    chosen = BuildOptions(**options)
    config = StoreConfig.made_for(tokenizer, vocab_size=vocabulary_size(tokenizer))
    opened = open_source(source, tokenizer, config.vocab_size, chosen.column, chosen.pattern)
    opened.name = corpus or opened.name
    engine = make_engine(chosen.engine, chosen.num_proc, config, tokenizer)
    with new_folder(Path(path), chosen.resume) as folder:
        progress = _add_shards(folder, config, opened, engine, chosen)
        shards = merge_due(folder, config, progress.shards, chosen.num_proc, chosen.progress)
        progress.shards = shards
        progress.write(folder)  # so that it can be resumed without the files that are deleted now
        sweep(folder, ARRAY_FILES, progress.files())
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
    """Adds documents to a datastore in new shards, which are merged with older ones of about their
    size, in new files; see [`Datastore.extend`]. The config.json is replaced at the end."""
    folder = Path(folder)
    config = StoreConfig.read(folder)
    remedy = f"it cannot be extended with {public_name(tokenizer)}"
    config.check_tokenizer(folder, tokenizer, remedy)
    noted = config.source.get("shard_tokens")  # plausible, or ignored: `source` is for people
    largest = max([BuildOptions.shard_tokens, *(shard.tokens for shard in config.shards)])
    if type(noted) is int and LEAST_NOTED <= noted <= largest:
        options = {"shard_tokens": noted} | options
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
                if not chosen.resume:  # resuming needs it until config.json is replaced
                    delete(folder / PROGRESS)
                _extended(config, shards, opened.name, chosen.deduplicate).write(folder)
            delete(folder / PROGRESS)
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
    """Merges all shards of a datastore into as few as possible, see [`Datastore.merge`]."""
    folder = Path(folder)
    with only_writer(folder):
        config = StoreConfig.read(folder)
        if not config.shards:
            raise DatastoreError(f"{folder} has only the compact form, which is not made of shards")
        progress = BuildProgress.read(folder)  # of an extension that may be resumed
        kept = progress.files() if progress else []
        _sweep(folder, kept)
        try:
            shards = merge_all(folder, config, num_proc, show)
            if shards != config.shards:
                replace(config, shards=shards).write(folder)
        finally:
            _sweep(folder, kept)
    return folder


def _sweep(folder: Path, kept: Iterable[FileEntry] = ()) -> None:
    """Deletes the files that config.json does not name (any more), except those to be kept."""
    sweep(folder, ARRAY_FILES, [*StoreConfig.read(folder).files(), *kept])


def _noted(source: Source, options: BuildOptions) -> dict[str, Any]:
    """What must not change when a build is resumed."""
    return {
        "corpus": source.name,
        "deduplicated": options.deduplicate,
        "shard_tokens": options.shard_tokens,
        "hf_refspec": __version__,
        "column": options.column,
        "pattern": options.pattern,
        "max_tokens": options.max_tokens,
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
    before = token_count(config.shards) - token_count(progress.shards)  # whatever was merged since
    return (noted | {"tokens before": before}).items() <= progress.options.items()


def _add_shards(
    folder: Path, config: StoreConfig, source: Source, engine: Engine, options: BuildOptions
) -> BuildProgress:
    """Writes a source's documents into new shards, which config.json does not name yet; returns
    their names, with those of the build that is resumed."""
    noted = _noted(source, options) | {
        "tokenizer fingerprint": config.fingerprint,
        "tokens before": token_count(config.shards),
    }
    progress = BuildProgress.begun(folder, noted, options.resume)
    sweep(folder, ARRAY_FILES, [*config.files(), *progress.files()])
    progress.write(folder)
    digests = None
    if options.deduplicate:
        shards = [*config.shards, *progress.shards]
        stored = (map_tokens(folder, config, shard) for shard in shards)
        digests = set(map(document_digest, split_documents(stored, config.separator)))
    done, hidden = (progress.documents, progress.entries), not options.progress or None
    token_batches = engine.tokenize(after(source.documents, progress.documents))
    if options.max_tokens is not None:
        token_batches = first_tokens(
            token_batches, options.max_tokens - token_count(progress.shards)
        )
    shape = options.shard_tokens, config.token_dtype
    try:
        with tqdm(
            desc="tokenizing",
            total=source.total,
            initial=progress.documents,
            unit=" documents",
            disable=hidden,
        ) as bar:
            packed = packed_documents(token_batches, *shape, done, digests, bar.update)
            write_shards(folder, packed, engine.sort, progress)
    finally:
        engine.close()
    if not progress.shards:
        kind = "that the datastore does not have" if config.shards else "with a token"
        raise ValueError(f"source has no document {kind}")
    return progress
