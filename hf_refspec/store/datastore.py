"""A datastore: a corpus as tokens with suffix arrays, or compacted to its commonest n-grams."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..corpus.tokenise import naming_failures
from ..index.crest import NgramTable
from ..index.suffix_array import IndexedText
from ..messages import check_count
from ..text_config import text_tokenizer
from .build import SHARD_TOKENS, BuildOptions, build_store, extend_store, merge_store, read_names
from .crest import (
    LEAST_BYTES,
    build_ngram_table,
    open_ngram_table,
    replace_ngram_table,
    write_ngram_table,
)
from .datastore_config import LONGEST_NGRAM, Form, StoreConfig
from .files import DatastoreError, check_writable, copy_file, new_folder, only_writer
from .folder_config import FolderConfig
from .shards import map_suffixes, map_tokens, split_documents
from .stored_folder import StoredFolder
from .stored_tokenizer import read_tokenizer

logger = logging.getLogger("hf_refspec")


class Datastore(StoredFolder[StoreConfig]):
    """A corpus for [`DatastoreDrafts`] to look drafts up in.

    It has one or both of two forms. The full form is the corpus's tokens with suffix arrays, 6
    bytes a token (with a vocabulary of less than 65,536); the compact form is a table of n-grams of
    any size that you choose. Both are memory-mapped: they open in milliseconds, and processes share
    their memory.

    Args:
        path (`str` or `Path`): The folder. See [`~Datastore.from_pretrained`] for one on the Hub.
        form (`"full"` or `"compact"`, *optional*): Which form to open; by default the full one, if
            there is one.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target model's, to check that the
            datastore was made for it.

    Attributes:
        form (`str`): The form that is open.
        ngrams ([`NgramTable`], *optional*): The compact form; `None` if the full one is open.
        shards (`list[IndexedText]`): The full form; empty if the compact one is open.

    Raises:
        DatastoreError: If there is no datastore, it lacks the form, was made for another tokenizer,
            or sizes or headers of its files are damaged; [`~Datastore.verify`] reads all.
    """

    config_type = StoreConfig

    def __init__(
        self,
        path: str | os.PathLike,
        form: Form | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self._written = _version_of(path)
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
            self.ngrams = open_ngram_table(self.path, config)
            self._warn_if_stale()
        # Mapped now, since another process may merge and delete them at any time.
        self.shards: list[IndexedText] = []
        for shard in part.shards:
            tokens, suffixes = map_tokens(self.path, config, shard), map_suffixes(self.path, shard)
            self.shards.append(IndexedText(tokens, suffixes, config.vocab_size))

    def _warn_if_stale(self) -> None:
        entry = self.config.ngrams
        if entry is not None and self.tokens and entry.corpus_tokens not in (0, self.tokens):
            counts = f"{entry.corpus_tokens:,} of its {self.tokens:,} tokens"
            logger.warning(
                "the compact form of %s was made of %s; compact() it again", self.path, counts
            )

    def __ror__(self, other: Any) -> Any:
        shown = f"{other!r} | rs.DatastoreDrafts(store)"
        raise TypeError(f"`|` joins a datastore to a drafter, not to {other!r}: write `{shown}`")

    def __repr__(self) -> str:
        entry = self.config.ngrams
        held = f"tokens={self.tokens:,}, documents={self.documents:,}"
        if self.form == "compact" and entry is not None:
            held = f"ngrams={sum(entry.ngrams):,}, nodes={entry.nodes:,}"
        held = f"form={self.form!r}, {held}, tokenizer={self.config.tokenizer!r}"
        return f"Datastore({str(self.path)!r}, {held})"

    @classmethod
    def build(
        cls,
        documents: Any,
        tokenizer: PreTrainedTokenizerBase,
        path: str | os.PathLike,
        *,
        column: str | None = None,
        pattern: str = "*",
        max_tokens: int | None = None,
        shard_tokens: int = SHARD_TOKENS,
        num_proc: int | None = None,
        deduplicate: bool = False,
        license: str | None = None,
        corpus_name: str | None = None,
        progress: bool = True,
    ) -> Datastore:
        """Builds a datastore in a new folder and opens it.

        Args:
            documents: A `datasets` dataset; a DataFrame or Series; a file of texts or rows (.jsonl,
                .json, .csv, .parquet, also with .gz), a folder, or a list of both; an iterable of
                texts, rows or lists of ids; or a dict of these by name, see [`~Datastore.add`].
            tokenizer (`PreTrainedTokenizerBase`): The target model's, a fast one.
            path (`str` or `Path`): The new folder.
            column (`str`, *optional*): Of rows; by default chats, `"text"`, `"content"`, or both
                `"prompt"` and `"completion"`.
            pattern (`str`, *optional*, defaults to `"*"`): Which files below a folder, as `"*.py"`.
            max_tokens (`int`, *optional*): Stop after the document that reaches this number.
            shard_tokens (`int`, *optional*, defaults to 32,000,000): Tokens of a shard; building
                takes about 12 bytes of memory for each.
            num_proc (`int`, *optional*): Threads; by default one a usable core.
            deduplicate (`bool`, *optional*, defaults to `False`): Drop exact repetitions, also of
                documents that are in the datastore already.
            license (`str`, *optional*): The documents' licence, by default the dataset's.
            corpus_name (`str`, *optional*): Their name, by default the dataset's or folder's.
            progress (`bool`, *optional*, defaults to `True`): Show progress bars.

        Raises:
            ValueError: If the documents have no token, one is invalid, or an option is out of its
                bounds.
            FileExistsError: If there is something at `path`.
            DatastoreError, OSError: If another process is building it, or it cannot be written.
        """
        tokenizer = text_tokenizer(tokenizer)
        options = BuildOptions(
            column, pattern, max_tokens, shard_tokens, num_proc, deduplicate, progress
        )
        with new_folder(path) as folder:
            build_store(folder, documents, tokenizer, options, license, corpus_name)
        return cls(path)

    def add(
        self, documents: Any, tokenizer: PreTrainedTokenizerBase | None = None, **options: Any
    ) -> Datastore:
        """Adds documents, replaces documents of the same names, and merges shards of similar size.

        This object, which is returned, drafts from them at once, others from their next call on;
        no call waits meanwhile. If it fails or is killed, the datastore is unchanged; once it has
        returned, the documents survive a crash.

        Args:
            documents: As in [`~Datastore.build`]. In a dict, `{name: document}`, each replaces the
                document of its name; an empty one only removes it.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): The one that it was built with; by
                default the one that [`~Datastore.load_tokenizer`] loads.
            options: `column`, `pattern`, `max_tokens`, `shard_tokens`, `num_proc`, `deduplicate`
                and `progress`, as in [`~Datastore.build`].

        Raises:
            ValueError: If there is nothing to add, one is neither a text nor ids, or none is left.
            DatastoreError: If it is damaged, for another tokenizer, only compact, or being written.
            OSError: If it cannot be written.
        """
        known = self._tokenizer if tokenizer is None else text_tokenizer(tokenizer)
        extend_store(self.path, documents, known, BuildOptions(**options))
        self.refresh()
        self._warn_if_stale()
        return self

    def refresh(self) -> None:
        """Reloads the folder if it has changed, as calls that draft from it do when they begin.

        It changes nothing if the folder cannot be opened or is for another tokenizer."""
        if _version_of(self.path) in (None, self._written):
            return
        with suppress(DatastoreError, OSError):
            opened = Datastore(self.path, self.form)
            if opened.config.fingerprint == self.config.fingerprint:
                # At once: other threads see either the old documents or the new ones.
                vars(self).update(vars(opened))

    def remove(self, *names: str) -> None:
        """Removes documents by name; raises a KeyError for an unknown one, and as `add`."""
        if missing := sorted({*names} - {*self.names()}):
            raise KeyError(f"{self.path} has no document {missing[0]!r}")
        self.add(dict.fromkeys(names, ""), progress=False)

    def names(self) -> list[str]:
        """Reads the names of the documents that have one, sorted, from the disk."""
        return sorted(
            self._read_with_retry(lambda config: read_names(self.path, config.names_file))
        )

    def __deepcopy__(self, _: Any) -> Datastore:
        return self  # forks of a drafter draft from what is added

    def merge(self, progress: bool = True) -> Datastore:
        """Merges all shards into as few as possible, of up to 2**31 - 2 tokens, and opens them.

        A single shard is searched the fastest, but all tokens are written again. Raises as
        [`~Datastore.add`]."""
        with self.naming_damage():
            merge_store(self.path, progress)
        return Datastore(self.path)

    def retokenize(
        self, tokenizer: PreTrainedTokenizerBase, path: str | os.PathLike, **options: Any
    ) -> Datastore:
        """Builds a datastore for another model from the documents of this one and opens it.

        Args:
            tokenizer (`PreTrainedTokenizerBase`): The other model's.
            path (`str` or `Path`): As in [`~Datastore.build`].
            **options: As in [`~Datastore.build`].

        Raises:
            ValueError: If this is not the full form; and as [`~Datastore.build`].
            DatastoreError: If its own copy of its tokenizer is missing or damaged.
        """
        if self.form != "full":
            raise ValueError("retokenize() needs the full form, but only the compact one is open")
        known = self.load_tokenizer()

        def texts() -> Iterator[str]:
            for ids in self.iter_documents():
                with self.naming_damage():
                    text: str = known.decode(ids, clean_up_tokenization_spaces=False)
                yield text

        options.setdefault("corpus_name", self.config.source.get("corpus"))
        options.setdefault("license", self.config.source.get("license"))
        return Datastore.build(texts(), tokenizer, path, **options)

    @classmethod
    def _part(cls, config: Any, form: Form | None = None, *_: Any, **__: Any) -> FolderConfig:
        return config.in_form(form)

    @property
    def tokens(self) -> int:
        """Tokens of the full form's documents."""
        return self.config.tokens

    @property
    def documents(self) -> int:
        """Documents of the full form."""
        return self.config.documents

    @property
    def largest_id(self) -> int:
        """The largest token that is drafted, which can be smaller than the tokenizer's last one.

        Raises a DatastoreError if a suffix array points outside of its shard."""
        if self.ngrams is not None:
            return int(self.ngrams.node_tokens.max(initial=0))
        with self.naming_damage():
            return max(shard.largest_id for shard in self.shards)

    def iter_documents(self) -> Iterator[np.ndarray]:
        """Yields the documents of the full form in order, each as its ids (n,)."""
        return split_documents((shard.tokens for shard in self.shards), self.config.separator)

    def compact(
        self,
        path: str | os.PathLike | None = None,
        *,
        published: bool = False,
        max_ngram: int = 3,
        ngrams_per_order: int | None = None,
        max_bytes: int | None = None,
        progress: bool = True,
    ) -> Datastore:
        """Builds and opens the compact form: the commonest n-grams, each with its draft tree.

        This is CREST (arXiv 2408.04678).

        Args:
            path (`str` or `Path`, *optional*): A new folder, for a datastore with only the compact
                form; by default it is added to this one and replaces an older one.
            published (`bool`, *optional*, defaults to `False`): Grow the trees by REST's
                algorithm, see [`DatastoreDrafts`]; with `ngrams_per_order` the form is CREST's.
            max_ngram (`int`, *optional*, defaults to 3): The most tokens of an n-gram.
            ngrams_per_order (`int`, *optional*): The most n-grams of each length, the commonest
                (then the smallest ids); 20,000 without `max_bytes`.
            max_bytes (`int`, *optional*): The most bytes of the file, used for the n-grams and
                nodes that are accepted most often for their bytes. By default as many as the full
                form has, unless `published` or `ngrams_per_order` decides.
            progress (`bool`, *optional*, defaults to `True`): Show a progress bar.

        Raises:
            ValueError: If this is not the full form, or an option is out of its bounds.
            DatastoreError: If its files do not belong together.
            FileExistsError: If there is something at `path`.
            OSError: If the compact form cannot be written; the datastore is unchanged.
        """
        if self.form != "full":
            raise ValueError("compact() needs the full form, but only the compact one is open")
        check_count("max_ngram", max_ngram, most=LONGEST_NGRAM)
        if max_bytes is not None:
            check_count("max_bytes", max_bytes, least=LEAST_BYTES)
        if path is None:
            check_writable(self.path)
        with nullcontext(self.path) if path is None else new_folder(path) as folder:
            with self.naming_damage():
                counts, table = build_ngram_table(
                    self.shards,
                    self.config,
                    published=published,
                    max_ngram=max_ngram,
                    ngrams_per_order=ngrams_per_order,
                    max_bytes=max_bytes,
                    progress=progress,
                )
            if path is None:
                replace_ngram_table(folder, self.config, table, counts)
            else:
                alone = replace(self.config, shards=[], ngrams=None, names_file=None)
                if alone.tokenizer_file is not None:
                    copy_file(self.path, alone.tokenizer_file, folder)
                write_ngram_table(folder, alone, table, counts, self.tokens)
        return Datastore(path or self.path, form="compact")

    def record(self, mat: dict[str, Any]) -> None:
        """Writes the MAT of the open form into config.json; raises as [`~Datastore.add`]."""
        measured = {"state": self.config.state(self.form), **mat}
        with only_writer(self.path):
            config = StoreConfig.read(self.path)
            others = [other for other in config.measured if other["form"] != self.form]
            source = config.source | {"mat": [*others, measured]}
            replace(config, source=source).write(self.path)

    @contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Raises errors of the index and the tokenizer as a DatastoreError that names the path."""
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
        """Loads the datastore's copy of the tokenizer that it was made with.

        It has neither a chat template nor names of special tokens. Raises a DatastoreError if it is
        missing, damaged or another tokenizer."""
        config = self.config
        if config.tokenizer_file is None:
            raise DatastoreError(f"{self.path} names no file of its tokenizer; give the tokenizer")
        tokenizer = read_tokenizer(
            self.path, config.tokenizer_file, config.tokenizer, config.vocab_size
        )
        self.check_tokenizer(tokenizer)
        return tokenizer


def _version_of(path: str | os.PathLike) -> tuple[int, int] | None:
    """The (mtime_ns, inode) of a folder's config.json; `None` if there is none."""
    with suppress(OSError):
        found = os.stat(Path(path) / "config.json")
        return found.st_mtime_ns, found.st_ino
    return None
