"""A datastore: a corpus as tokens with suffix arrays, or compacted to its commonest n-grams."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from huggingface_hub import CommitInfo
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..index.crest_table import NgramTable
from ..index.suffix_array import IndexedText
from .build.corpus import build_store, extend_store
from .compact import compact_form
from .fingerprint import tokenizer_fingerprint
from .folder import (
    LONGEST_NGRAM,
    DatastoreError,
    NgramsEntry,
    StoreConfig,
    check_file,
    find_file,
    new_folder,
    only_writer,
    read_arrays,
    write_arrays,
)
from .hub import fetch, push

Form: TypeAlias = Literal["full", "compact"]

# Tokens that are searched for the ends of documents at a time.
_BLOCK = 1 << 20


class Datastore:
    """A corpus that drafts are looked up in, see [`DatastoreDrafts`].

    It has one or both of two forms. The full form is the corpus's tokens with suffix arrays, 6
    bytes a token (with a vocabulary of less than 65,536). The compact form is a table of n-grams,
    as large as it is made. Both stay on disk, mapped into memory: to open a datastore takes
    milliseconds, whatever its size, and several processes share what they read of it.

    Args:
        path (`str` or `Path`): The folder. See [`~Datastore.from_pretrained`] for one on the Hub.
        form (`"full"` or `"compact"`, *optional*): Which form to open; by default the full one, if
            it is there.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target model's, to make sure that
            the datastore was made for it.

    Attributes:
        path (`Path`): The folder.
        config ([`StoreConfig`]): What its config.json says.
        form (`str`): The form that is open.
        ngrams ([`NgramTable`], *optional*): The compact form; `None` if the other one is open.

    Raises:
        DatastoreError: If there is no datastore, it does not have the form, its files are damaged
            (as far as their sizes tell; headers are read when the files are mapped, and
            [`~Datastore.verify`] reads all) or it was made for another tokenizer.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        form: Form | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        if form is not None and form not in get_args(Form):
            raise ValueError(f"form must be one of {get_args(Form)}, but is {form!r}")
        self.path = Path(path)
        self.config = StoreConfig.read(self.path)
        if form is None:
            form = "full" if self.config.shards else "compact"
        self.form: Form = form
        self.ngrams: NgramTable | None = None
        if form == "full":
            self._check_shards()
        else:
            self.ngrams = self._open_ngrams()
        if tokenizer is not None:
            self._check_tokenizer(tokenizer)

    def __repr__(self) -> str:
        return f"Datastore({str(self.path)!r}, form={self.form!r}, tokens={self.tokens:,})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path.absolute(), self.form)  # a copy maps the same files

    @classmethod
    def build(
        cls,
        source: Any,
        tokenizer: PreTrainedTokenizerBase,
        path: str | os.PathLike,
        **options: Any,
    ) -> Datastore:
        """Builds a datastore in a new folder and opens it; arguments as of [`build_store`]."""
        return cls(build_store(source, tokenizer, path, **options))

    def extend(self, more: Any, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Datastore:
        """Adds documents in new shards; arguments as of [`extend_store`].

        This object, and whoever else has the datastore open, goes on with what it has.

        Returns:
            [`Datastore`]: All of it, opened.
        """
        return Datastore(extend_store(self.path, more, tokenizer, **options))

    def retokenize(
        self,
        tokenizer: PreTrainedTokenizerBase,
        path: str | os.PathLike,
        old_tokenizer: PreTrainedTokenizerBase | None = None,
        **options: Any,
    ) -> Datastore:
        """Builds a datastore for another model from the documents of this one.

        Args:
            tokenizer (`PreTrainedTokenizerBase`): The other model's.
            path (`str` or `Path`): The new folder.
            old_tokenizer (`PreTrainedTokenizerBase`, *optional*): The one that this datastore was
                made with; by default it is loaded by the name that config.json says.
            options: As of [`build_store`].

        Returns:
            [`Datastore`]: The new one, opened.

        Raises:
            ValueError: If this is not the full form.
            DatastoreError: If `old_tokenizer` is not the one that it was made with.
            OSError: If that cannot be loaded.
        """
        if self.form != "full":
            raise ValueError("retokenize() needs the full form, but only the compact one is open")
        if old_tokenizer is None:
            old_tokenizer = self.load_tokenizer()
        self._check_tokenizer(old_tokenizer)
        documents = (
            old_tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            for ids in self.iter_documents()
        )
        about = {key: self.config.source.get(key) for key in ("corpus", "license")}
        return Datastore.build(documents, tokenizer, path, **about | options)

    @classmethod
    def from_pretrained(
        cls,
        repo_or_path: str | os.PathLike,
        form: Form | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike | None = None,
        local_files_only: bool = False,
    ) -> Datastore:
        """Opens a datastore from a folder or from the Hub, where it is a dataset repo.

        Args:
            repo_or_path (`str` or `Path`): A folder, or a repo id such as `"org/store"`.
            form (`"full"` or `"compact"`, *optional*): Which form to open; of a repo, only the
                files of that form are downloaded.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): See [`Datastore`].
            revision (`str`, *optional*): A branch, tag or commit.
            token (`str` or `bool`, *optional*): As in `huggingface_hub`.
            cache_dir (`str` or `Path`, *optional*): As in `huggingface_hub`.
            local_files_only (`bool`, *optional*, defaults to `False`): Use only what has been
                downloaded before.

        Raises:
            OSError: If there is no such folder or repo, or it cannot be reached.
            DatastoreError: See [`Datastore`].
        """
        folder = fetch(
            repo_or_path,
            form=form,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
        )
        return cls(folder, form, tokenizer)

    def save_pretrained(self, path: str | os.PathLike) -> None:
        """Copies the datastore, all of it that is open, into a new folder.

        Raises:
            FileExistsError: If there is something at `path`.
        """
        with new_folder(Path(path)) as folder:
            config = self.config if self.form == "full" else replace(self.config, shards=[])
            for entry in config.files():
                shutil.copyfile(find_file(self.path, entry), folder / entry.name)
            config.write(folder)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str = "Upload the datastore",
        revision: str | None = None,
        create_pr: bool = False,
    ) -> CommitInfo:
        """Publishes the datastore as a dataset repo, with a card.

        Args:
            repo_id (`str`): Such as `"org/store"`; the repo is made if there is none.
            private (`bool`, *optional*): Whether a new repo is private; by default as the owner of
                the account has set it.
            token (`str` or `bool`, *optional*): As in `huggingface_hub`.
            commit_message (`str`, *optional*): Of the one commit.
            revision (`str`, *optional*): A branch; it is made if there is none.
            create_pr (`bool`, *optional*, defaults to `False`): Whether to propose it only.

        Returns:
            `huggingface_hub.CommitInfo`: The commit.

        Raises:
            DatastoreError: If a file is not as it was written.
            OSError: If the repo cannot be written.
        """
        return push(
            self.path,
            repo_id,
            private=private,
            token=token,
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
        )

    @property
    def tokens(self) -> int:
        """Tokens of the full form, separators between documents included."""
        return sum(shard.tokens for shard in self.config.shards)

    @property
    def documents(self) -> int:
        """Documents of the full form."""
        return sum(shard.documents for shard in self.config.shards)

    def iter_documents(self) -> Iterator[np.ndarray]:
        """Reads the documents of the full form in order, each an array of token ids."""
        separator = self.config.separator
        begun: list[np.ndarray] = []  # a document can go on in the next shard
        for shard in self.shards:
            for begin in range(0, len(shard.tokens), _BLOCK):
                tokens = shard.tokens[begin : begin + _BLOCK]
                start = 0
                for end in np.flatnonzero(tokens == separator):
                    yield np.concatenate([*begun, tokens[start:end]])
                    begun, start = [], int(end) + 1
                begun.append(tokens[start:])
        if any(map(len, begun)):
            yield np.concatenate(begun)

    def verify(self) -> None:
        """Reads all files and compares them with their checksums.

        Raises:
            DatastoreError: If a file is not as it was written.
        """
        for entry in self.config.files():
            if self.form == "full" or entry == getattr(self.config.ngrams, "file", None):
                check_file(self.path, entry)

    def compact(
        self,
        path: str | os.PathLike | None = None,
        *,
        max_ngram: int = 3,
        ngrams_per_order: int | None = None,
        max_bytes: int | None = None,
        progress: bool = True,
    ) -> Datastore:
        """Makes the compact form: the commonest n-grams, each with its draft tree (CREST).

        Args:
            path (`str` or `Path`, *optional*): A new folder, for a datastore that has only the
                compact form; by default it is added to this one, in place of an older one.
            max_ngram (`int`, *optional*, defaults to 3): The most tokens of an n-gram.
            ngrams_per_order (`int`, *optional*): The most n-grams of each order; 20,000 if
                `max_bytes` is not given either.
            max_bytes (`int`, *optional*): The most bytes of the file; those nodes of the trees are
                kept that are accepted most often.
            progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar.

        Returns:
            [`Datastore`]: The compact form, opened.

        Raises:
            ValueError: If this is not the full form, or a number is too small.
            FileExistsError: If there is something at `path`.
            OSError: If the compact form cannot be written; the datastore is as it was.
        """
        if self.form != "full":
            raise ValueError("compact() needs the full form, but only the compact one is open")
        if not 1 <= max_ngram <= LONGEST_NGRAM:
            raise ValueError(f"max_ngram must be from 1 to {LONGEST_NGRAM}, but is {max_ngram}")
        for name, number, least in (
            ("ngrams_per_order", ngrams_per_order, 1),
            ("max_bytes", max_bytes, 4096),
        ):
            if number is not None and number < least:
                raise ValueError(f"{name} must be at least {least}, but is {number}")
        if path is not None:
            with new_folder(Path(path)) as folder:
                counts, table = compact_form(
                    self.shards, self.config, max_ngram, ngrams_per_order, max_bytes, progress
                )
                alone = replace(self.config, shards=[], ngrams=None)
                _add_ngrams(folder, alone, table, counts, self.tokens)
            return Datastore(path, form="compact")
        counts, table = compact_form(
            self.shards, self.config, max_ngram, ngrams_per_order, max_bytes, progress
        )
        with only_writer(self.path):
            # As it is by now: it may have been compacted or extended since this one was opened.
            config = StoreConfig.read(self.path)
            if config.shards[: len(self.config.shards)] != self.config.shards:
                raise DatastoreError(f"{self.path} has been replaced meanwhile; open it again")
            _add_ngrams(self.path, config, table, counts, self.tokens)
        return Datastore(self.path, form="compact")

    def load_tokenizer(self, name: str | None = None) -> PreTrainedTokenizerBase:
        """Loads the tokenizer that the datastore was made with.

        Args:
            name (`str`, *optional*): A folder or a Hub id; by default what config.json names.

        Raises:
            OSError: If it cannot be loaded.
            DatastoreError: If it is another one.
        """
        try:
            # The name comes from a file that nobody has checked.
            tokenizer = AutoTokenizer.from_pretrained(
                name or self.config.tokenizer, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            if name is not None:
                raise
            raise OSError(
                f"the tokenizer that {self.path} names, {self.config.tokenizer!r}, cannot be "
                "loaded; give its folder or Hub id, or the tokenizer itself"
            ) from error
        self._check_tokenizer(tokenizer)
        return tokenizer

    def _check_shards(self) -> None:
        if not self.config.shards:
            raise DatastoreError(
                f'{self.path} has only the compact form; open it with form="compact"'
            )
        for shard in self.config.shards:
            find_file(self.path, shard.tokens_file)
            find_file(self.path, shard.suffixes_file)

    @cached_property
    def shards(self) -> list[IndexedText]:
        """The full form, mapped into memory when it is first needed; empty if the other is open."""
        if self.form == "compact":
            return []
        dtype, vocab_size = self.config.token_dtype, self.config.vocab_size
        shards = []
        for shard in self.config.shards:
            length = shard.tokens
            tokens = read_arrays(self.path, shard.tokens_file, {"tokens": (dtype, length)})
            suffixes = read_arrays(
                self.path, shard.suffixes_file, {"suffixes": (np.dtype(np.int32), length)}
            )
            shards.append(IndexedText(tokens["tokens"], suffixes["suffixes"], vocab_size))
        return shards

    def _open_ngrams(self) -> NgramTable:
        entry = self.config.ngrams
        if entry is None:
            raise DatastoreError(f"{self.path} has no compact form; make it with compact()")
        entries, dtype = sum(entry.ngrams), self.config.token_dtype
        max_ngram = len(entry.ngrams)
        arrays = read_arrays(
            self.path,
            entry.file,
            {
                "keys": (dtype, entries * max_ngram),
                "slots": (np.dtype(np.uint32), None),
                "starts": (np.dtype(np.uint32), entries + 1),
                "node_tokens": (dtype, entry.nodes),
                "node_parents": (np.dtype(np.uint8), entry.nodes),
                "node_probs": (np.dtype(np.uint8), entry.nodes),
            },
        )
        if len(arrays["slots"]).bit_count() != 1:
            raise DatastoreError(
                f"{self.path / entry.file.name} is damaged: slots has {len(arrays['slots'])} "
                "entries, no power of two"
            )
        return NgramTable(**arrays, max_ngram=max_ngram, vocab_size=self.config.vocab_size)

    def _check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        fingerprint = tokenizer_fingerprint(tokenizer)
        if fingerprint != self.config.fingerprint:
            raise DatastoreError(
                f"{self.path} was made for another tokenizer: {self.config.tokenizer} with the "
                f"fingerprint {self.config.fingerprint}, not {tokenizer.name_or_path} with "
                f"{fingerprint}; make one for this tokenizer with retokenize()"
            )


def _add_ngrams(
    folder: Path, config: StoreConfig, table: NgramTable, counts: list[int], corpus_tokens: int
) -> None:
    """Writes the compact form into a datastore's folder and has its config.json name it."""
    arrays = {
        name: getattr(table, name)
        for name in ("keys", "slots", "starts", "node_tokens", "node_parents", "node_probs")
    }
    written = write_arrays(folder / "ngrams.safetensors", arrays)
    # Named after its content, so that an older one stays whole until config.json names this one.
    file = replace(written, name=f"ngrams-{written.sha256[:12]}.safetensors")
    os.replace(folder / written.name, folder / file.name)
    nodes = len(table.node_tokens)
    replace(config, ngrams=NgramsEntry(counts, nodes, corpus_tokens, file)).write(folder)
    if config.ngrams is not None and config.ngrams.file.name != file.name:
        (folder / config.ngrams.file.name).unlink(missing_ok=True)
