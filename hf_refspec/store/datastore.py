"""A datastore: a corpus as tokens with suffix arrays, or compacted to its commonest n-grams."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..index.crest_table import NgramTable
from ..index.suffix_array import IndexedText
from .build.corpus import BuildOptions, build_store, changing, extend_store
from .build.engine import usable_cores
from .compact import CompactOptions, compact_form, open_ngrams, write_ngrams
from .datastore_config import LARGEST_SHARD, Form, StoreConfig, check_form
from .document_names import read_names
from .files import DatastoreError, copy_file
from .folder import check_writable, new_folder, only_writer
from .shards import grouped, map_shard, merge_shards, split_documents
from .stored_folder import StoredFolder
from .stored_tokenizer import naming_failures, read_tokenizer

logger = logging.getLogger("hf_refspec")


class Datastore(StoredFolder[StoreConfig]):
    """A corpus for [`DatastoreDrafts`] to look drafts up in.

    It has one or both of two forms. The full form is the corpus's tokens with suffix arrays, 6
    bytes a token (with a vocabulary of less than 65,536). The compact form is a table of n-grams of
    any size that you choose. Both are memory-mapped: a datastore of any size opens in milliseconds,
    and several processes share what they read of it.

    Args:
        path (`str` or `Path`): The folder. See [`~Datastore.from_pretrained`] for one on the Hub.
        form (`"full"` or `"compact"`, *optional*): Which form to open; by default the full one, if
            there is one.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target model's, to check that the
            datastore was made for it.

    Attributes:
        path (`Path`): The folder.
        config ([`StoreConfig`]): Its config.json.
        form (`str`): The form that is open.
        ngrams ([`NgramTable`], *optional*): The compact form; `None` if the full one is open.
        shards (`list[IndexedText]`): The full form; empty if the compact one is open.

    Raises:
        DatastoreError: If there is no datastore, it does not have the form, its files are damaged
            (as far as their sizes and headers tell; [`~Datastore.verify`] reads all) or it was made
            for another tokenizer.
    """

    config_type = StoreConfig
    remedy = "make one with retokenize()"

    def __init__(
        self,
        path: str | os.PathLike,
        form: Form | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self._written = _when_written(Path(path))
        super().__init__(path, form)
        if tokenizer is not None:
            self.check_tokenizer(tokenizer)

    def _open(self, config: StoreConfig) -> None:
        (form,) = self._arguments
        if form is None:
            form = "full" if config.shards else "compact"
        self.form: Form = form
        try:
            part = config.in_form(self.form)
        except DatastoreError as error:
            raise DatastoreError(f"{self.path} cannot be opened: {error}") from None
        self.ngrams: NgramTable | None = None
        if self.form == "compact":
            self.ngrams = open_ngrams(self.path, config)
            self._warn_if_stale()
        # Mapped now, since another process may merge and delete them at any time.
        self.shards: list[IndexedText] = [
            map_shard(self.path, config, shard) for shard in part.shards
        ]

    def _warn_if_stale(self) -> None:
        entry, tokens = self.config.ngrams, sum(shard.tokens for shard in self.config.shards)
        if entry is not None and tokens and entry.corpus_tokens not in (0, tokens):
            logger.warning(
                "the compact form of %s was made of %s of its %s tokens; compact() it again",
                self.path,
                f"{entry.corpus_tokens:,}",
                f"{tokens:,}",
            )

    def __repr__(self) -> str:
        entry = self.config.ngrams
        if self.form == "compact" and entry is not None:
            held = f"ngrams={sum(entry.ngrams):,}, nodes={entry.nodes:,}"
        else:
            held = f"tokens={self.tokens:,}, documents={self.documents:,}"
        tokenizer = f"tokenizer={self.config.tokenizer!r}"
        return f"Datastore({str(self.path)!r}, form={self.form!r}, {held}, {tokenizer})"

    @classmethod
    def build(
        cls,
        documents: Any,
        tokenizer: PreTrainedTokenizerBase,
        path: str | os.PathLike,
        *,
        form: Form = "full",
        max_bytes: int | None = None,
        **options: Any,
    ) -> Datastore:
        """Builds a datastore in a new folder and opens it.

        Args:
            documents, tokenizer, path, options: See [`build_store`].
            form (`"full"` or `"compact"`, *optional*, defaults to `"full"`): With `"compact"` the
                full form is deleted once the compact one is made of it.
            max_bytes (`int`, *optional*): The most bytes of the compact form.

        Raises:
            TypeError: If `tokenizer` is no tokenizer, or `path` no path.
            ValueError: If an option is for the other form; and as [`build_store`].
        """
        check_form(form)
        is_path = isinstance(path, str | os.PathLike)
        if not is_path or not isinstance(tokenizer, PreTrainedTokenizerBase):
            given = ", ".join(type(each).__name__ for each in (documents, tokenizer, path))
            raise TypeError(f"build takes (documents, tokenizer, path), but was given ({given})")
        if form == "full":
            if max_bytes is not None:
                raise ValueError(f'max_bytes={max_bytes} is for form="compact"')
            return cls(build_store(documents, tokenizer, path, **options))
        chosen = CompactOptions(max_bytes=max_bytes, progress=options.get("progress", True))
        with new_folder(Path(path)) as folder:
            full = cls(build_store(documents, tokenizer, folder / "full", **options))
            full._write_compact(folder, chosen)
            shutil.rmtree(full.path)
        return cls(path, form="compact")

    def add(
        self, documents: Any, tokenizer: PreTrainedTokenizerBase | None = None, **options: Any
    ) -> Datastore:
        """Adds documents, replaces those of the same names, and merges shards of about one size.

        From then on this object drafts from them; calls that draft from it meanwhile do not wait.
        Other objects and processes do from their next call on, see [`~Datastore.refresh`]. If it
        fails or is killed, the datastore is unchanged; what it has returned from, no kill loses.

        Args:
            documents: As in [`build_store`]. Of a dict, `{name: document}`, each replaces
                the document of its name; one that is empty only removes it.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): The one that it was built with; by
                default the one that [`~Datastore.load_tokenizer`] loads.
            options: See [`BuildOptions`].

        Returns:
            [`Datastore`]: This object.

        Raises:
            ValueError: If there is nothing to add, or an entry is no document, or none is left.
            DatastoreError: If the datastore cannot be read, is for another tokenizer, has only the
                compact form, or another process or thread is writing it.
            OSError: If the shards cannot be written.
        """
        if tokenizer is None:
            tokenizer = self._tokenizer
        extend_store(self.path, documents, tokenizer, **options)
        self.refresh()
        self._warn_if_stale()
        return self

    def refresh(self) -> None:
        """Takes what has been written since it was opened, as calls that draft from it do when they
        begin. What cannot be opened, or is for another tokenizer, it leaves alone."""
        if _when_written(self.path) in (None, self._written):
            return
        with suppress(DatastoreError, OSError):
            opened = Datastore(self.path, self.form)
            if opened.config.fingerprint == self.config.fingerprint:
                # At once: a call that drafts, or another refresh, sees the old or the new ones.
                vars(self).update(vars(opened))

    def remove(self, *names: str) -> None:
        """Removes documents by their names, as [`~Datastore.add`] does.

        Raises:
            KeyError: If there is no document of such a name.
        """
        if missing := sorted({*names} - {*self.names()}):
            raise KeyError(f"{self.path} has no document {missing[0]!r}")
        self.add(dict.fromkeys(names, ""), progress=False)

    def names(self) -> list[str]:
        """The names of the documents that have one, sorted."""
        self.refresh()
        return self._steadily(lambda config: sorted(read_names(self.path, config.names_file)))

    def __deepcopy__(self, _: Any) -> Datastore:
        return self  # forks of a drafter draft from what is added

    def merge(self, num_proc: int | None = None, progress: bool = True) -> Datastore:
        """Merges all shards into as few as possible, one for up to 2**31 - 2 tokens.

        A single shard is searched the fastest, but all tokens are written again.

        Args:
            num_proc (`int`, *optional*): Threads that merge. By default one for each usable core.
            progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar.

        Returns:
            [`Datastore`]: The same documents, opened.

        Raises:
            ValueError: If `num_proc` is less than 1.
            DatastoreError: If it is damaged, or another process is writing it.
            OSError: If the merged shards cannot be written; the datastore is unchanged.
        """
        threads = BuildOptions(num_proc=num_proc).num_proc or usable_cores()
        with self.naming_damage(), changing(self.path, ", which has no shards") as config:
            groups = grouped(config.shards, growth=LARGEST_SHARD)
            shards = merge_shards(self.path, config, groups, threads, progress)
            if shards != config.shards:
                replace(config, shards=shards).write(self.path)
        return Datastore(self.path)

    def retokenize(
        self,
        tokenizer: PreTrainedTokenizerBase,
        path: str | os.PathLike,
        **options: Any,
    ) -> Datastore:
        """Builds a datastore for another model from the documents of this one.

        Args:
            tokenizer (`PreTrainedTokenizerBase`): The other model's.
            path (`str` or `Path`): The new folder.
            options: See [`build_store`].

        Returns:
            [`Datastore`]: The new one, opened.

        Raises:
            ValueError: If this is not the full form.
            DatastoreError: If its own copy of its tokenizer is missing or damaged.
        """
        if self.form != "full":
            raise ValueError("retokenize() needs the full form, but only the compact one is open")
        own = self.load_tokenizer()
        about = {
            "corpus_name": self.config.source.get("corpus"),
            "license": self.config.source.get("license"),
        }

        def texts() -> Iterator[str]:
            for ids in self.iter_documents():
                with self.naming_damage():
                    text: str = own.decode(ids, clean_up_tokenization_spaces=False)
                yield text

        return Datastore(build_store(texts(), tokenizer, path, **about | options))

    @classmethod
    def _part(
        cls, config: StoreConfig, form: Form | None = None, *_: Any, **__: Any
    ) -> StoreConfig:
        return config.in_form(form)

    @property
    def tokens(self) -> int:
        """Tokens of the full form, with the separators between documents."""
        return sum(shard.tokens for shard in self.config.shards)

    @property
    def documents(self) -> int:
        """Documents of the full form."""
        return sum(shard.documents for shard in self.config.shards)

    @property
    def largest_id(self) -> int:
        """The largest token that is drafted, which can be smaller than the tokenizer's last one.

        Raises:
            DatastoreError: If a suffix array points outside of its shard.
        """
        if self.ngrams is not None:
            return int(self.ngrams.node_tokens.max(initial=0))
        with self.naming_damage():
            return max(shard.largest_id for shard in self.shards)

    def iter_documents(self) -> Iterator[np.ndarray]:
        """Yields the documents of the full form in order, each an array of token ids."""
        return split_documents((shard.tokens for shard in self.shards), self.config.separator)

    def compact(self, path: str | os.PathLike | None = None, **options: Any) -> Datastore:
        """Builds the compact form: the commonest n-grams, each with its draft tree (CREST, arXiv
        2408.04678).

        Args:
            path (`str` or `Path`, *optional*): A new folder, for a datastore with only the compact
                form; by default it is added to this one and replaces an older one.
            options: See [`CompactOptions`].

        Returns:
            [`Datastore`]: The compact form, opened.

        Raises:
            ValueError: If this is not the full form, or an option is out of its bounds.
            DatastoreError: If its files do not belong together.
            FileExistsError: If there is something at `path`.
            OSError: If the compact form cannot be written; the datastore is unchanged.
        """
        if self.form != "full":
            raise ValueError("compact() needs the full form, but only the compact one is open")
        chosen = CompactOptions(**options)
        if path is not None:
            with new_folder(Path(path)) as folder:
                self._write_compact(folder, chosen)
            return Datastore(path, form="compact")
        check_writable(self.path)
        with self.naming_damage():
            counts, table = compact_form(self.shards, self.config, chosen)
        with only_writer(self.path):
            # It may have been compacted or extended since this object was opened.
            config = StoreConfig.read(self.path)
            tokens = sum(shard.tokens for shard in config.shards)
            if config.fingerprint != self.config.fingerprint or tokens < self.tokens:
                raise DatastoreError(f"{self.path} has been replaced meanwhile; open it again")
            write_ngrams(self.path, config, table, counts, self.tokens)
        return Datastore(self.path, form="compact")

    def record(self, mat: dict[str, Any]) -> None:
        """Writes the MAT that was measured of the form that is open into config.json, for the card;
        raises as [`~Datastore.add`]."""
        measured = {"state": self.config.state(self.form), **mat}
        with only_writer(self.path):
            config = StoreConfig.read(self.path)
            others = [each for each in config.measured if each["form"] != self.form]
            source = config.source | {"mat": [*others, measured]}
            replace(config, source=source).write(self.path)

    def _write_compact(self, folder: Path, options: CompactOptions) -> None:
        """Writes the compact form alone into a new folder."""
        with self.naming_damage():
            counts, table = compact_form(self.shards, self.config, options)
        alone = replace(self.config, shards=[], ngrams=None, names_file=None)
        if alone.tokenizer_file is not None:
            copy_file(self.path, alone.tokenizer_file, folder)
        write_ngrams(folder, alone, table, counts, self.tokens)

    @contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Around a look-up, which reads unchecked files: raises a ValueError of the index, or an
        error of the tokenizer, as a DatastoreError that names the path."""
        try:
            with naming_failures(f"{self.path}: its tokenizer fails"):
                yield
        except DatastoreError:
            raise
        except ValueError as error:
            raise DatastoreError(f"{self.path}: {error}") from None

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return self.load_tokenizer()

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Loads the datastore's own copy of the tokenizer that it was made with, which has neither
        a chat template nor names of special tokens.

        Raises:
            DatastoreError: If it is missing or damaged, or another tokenizer.
        """
        config = self.config
        if config.tokenizer_file is None:
            raise DatastoreError(f"{self.path} names no file of its tokenizer; give the tokenizer")
        tokenizer = read_tokenizer(
            self.path, config.tokenizer_file, config.tokenizer, config.vocab_size
        )
        self.check_tokenizer(tokenizer)
        return tokenizer


def _when_written(folder: Path) -> tuple[int, int] | None:
    """What changes when a config.json is replaced; `None` if there is none."""
    with suppress(OSError, ValueError):
        found = os.stat(folder / "config.json")
        return found.st_mtime_ns, found.st_ino
    return None
