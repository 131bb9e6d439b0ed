"""The datastore of a kNN-LM: for every token of a corpus, the hidden state that came before it.

    config.json             all else that is to be known, with sizes and checksums
    entries.safetensors     keys    float32 or float16, the hidden state after a context
                            norms   float32, the squared length of each key
                            values  int32, the token that followed
                            probe   float32, the model's hidden state after a text that is known
    sketch.safetensors      of larger datastores, see [`~store.pq_index`]

Entries are in the order of the corpus: those that follow an entry are of the tokens after it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args
from weakref import WeakKeyDictionary

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..index.faiss_index import HnswIndex
from ..index.flat import FlatIndex
from ..index.retrieved import Retrieved
from .build.hidden_states import Layer, watched
from .build.windows import batches, context_length, padded, tokenized, windows
from .fingerprint import tokenizer_fingerprint
from .folder import (
    CONFIG,
    DatastoreError,
    FileEntry,
    check_file,
    new_folder,
    only_writer,
    read_arrays,
    write_arrays,
    write_config,
)
from .pq_index import FILE as SKETCH
from .pq_index import LEAST_ROWS, Sketch, axes_of

Index: TypeAlias = Literal["flat", "hnsw"]

FORMAT = "knn-1"
ENTRIES = "entries.safetensors"
KEY_DTYPES = ("float32", "float16")
# The entries after one that was retrieved which the request cache takes as well (RaLMSpec, 5.3).
NEIGHBOURS = 10
_LARGEST_CONFIG = 1 << 16
_MOST_ENTRIES = 2**31 - 1
_PROBE_LENGTH = 8
# How far, in relation, the probe may be off: other number formats are, by a percent or two.
_PROBE_TOLERANCE = 0.05
_CHECKED_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class KnnConfig:
    """What config.json says.

    Attributes:
        model (`str`): The model's name, for people.
        layer (`str`): Which hidden state a key is.
        fingerprint (`str`): Of the tokenizer, see [`tokenizer_fingerprint`].
        vocab_size (`int`): All values are below it.
        entries, dimension (`int`): The shape of the keys.
        key_dtype (`str`): `"float32"` or `"float16"`.
        file (`FileEntry`): Where the entries are.
        sketch (`FileEntry`, *optional*): Where their sketch is, if there is one.
    """

    model: str
    layer: Layer
    fingerprint: str
    vocab_size: int
    entries: int
    dimension: int
    key_dtype: str
    file: FileEntry
    sketch: FileEntry | None = None

    def write(self, folder: Path) -> None:
        """Replaces the folder's config.json in one go."""
        write_config(folder, {"format": FORMAT, **asdict(self)})

    @classmethod
    def read(cls, folder: Path) -> KnnConfig:
        """Reads a folder's config.json and checks all that it says by itself.

        Raises:
            DatastoreError: If there is none, or it is none that this version can read.
        """
        path = folder / CONFIG
        if not path.is_file():
            raise DatastoreError(f"{folder} is not a kNN datastore: it has no {CONFIG}")
        with open(path, "rb") as file:
            text = file.read(_LARGEST_CONFIG + 1)
        try:
            if len(text) > _LARGEST_CONFIG:
                raise ValueError("it is too large")
            content = json.loads(text)
            if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
                raise ValueError(f"its format is not {FORMAT!r}")
            sketch = content.pop("sketch", None)
            files = {
                "file": FileEntry(**content["file"]),
                "sketch": None if sketch is None else FileEntry(**sketch),
            }
            config = cls(**{**content, **files})
            config._check()
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DatastoreError(
                f"{path} is not a kNN datastore's, or is damaged: {error}"
            ) from None
        return config

    def _check(self) -> None:
        texts = (self.model, self.layer, self.fingerprint, self.key_dtype)
        numbers = (self.entries, self.dimension, self.vocab_size)
        fits = (
            all(isinstance(text, str) for text in texts)
            and all(type(number) is int and 0 < number <= _MOST_ENTRIES for number in numbers)
            and self.layer in get_args(Layer)
            and self.key_dtype in KEY_DTYPES
            and _is_of(self.file, ENTRIES)
            and (self.sketch is None or _is_of(self.sketch, SKETCH))
        )
        if not fits:
            raise ValueError(f"a field has a value that it cannot have: {self!r:.500}")


def _is_of(entry: FileEntry, name: str) -> bool:
    """Whether it is the entry of a file, which else could be one outside of the folder."""
    return entry.name == name and type(entry.size) is int and isinstance(entry.sha256, str)


class KnnDatastore:
    """A corpus as pairs of hidden state and next token, for [`knn_lm`].

    It stays on disk, mapped into memory (float16 keys are turned to float32 in memory). To open it
    reads the values alone; an HNSW graph is built anew.

    Args:
        path (`str` or `Path`): The folder.
        index (`"flat"` or `"hnsw"`, *optional*, defaults to `"flat"`): How the nearest keys are
            found: exactly, or approximately by a graph (FAISS, extra `retrieval`), which takes
            minutes to build for a million entries, and memory for a copy of the keys.

    Attributes:
        path (`Path`): The folder.
        config ([`KnnConfig`]): What its config.json says.
        keys (`np.ndarray`, float32 of shape `(entries, dimension)`): Hidden states.
        values (`np.ndarray`, int32 of shape `(entries,)`): The tokens that followed them.

    Raises:
        DatastoreError: If there is no datastore, or it is damaged, as far as sizes, headers and
            values tell; [`~KnnDatastore.verify`] reads all.
        ImportError: If FAISS is needed and not installed.
    """

    def __init__(self, path: str | os.PathLike, index: Index = "flat") -> None:
        if index not in get_args(Index):
            raise ValueError(f"index must be one of {get_args(Index)}, but is {index!r}")
        self.path = Path(path)
        self.config = config = KnnConfig.read(self.path)
        self.index: Index = index
        entries, dimension = config.entries, config.dimension
        arrays = read_arrays(
            self.path,
            config.file,
            {
                "keys": (np.dtype(config.key_dtype), entries * dimension),
                "norms": (np.dtype(np.float32), entries),
                "values": (np.dtype(np.int32), entries),
                "probe": (np.dtype(np.float32), dimension),
            },
        )
        self.keys = arrays["keys"].reshape(entries, dimension).astype(np.float32, copy=False)
        self.values = arrays["values"]
        self._probe = arrays["probe"]
        self._known: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
        if self.values.min() < 0 or self.values.max() >= config.vocab_size:
            raise DatastoreError(
                f"{self.path / ENTRIES} is damaged: a value is not below {config.vocab_size}"
            )
        vector_index = FlatIndex if index == "flat" else HnswIndex
        self._index = vector_index(self.keys, arrays["norms"], "l2")

    def __repr__(self) -> str:
        return f"KnnDatastore({str(self.path)!r}, index={self.index!r}, entries={len(self):,})"

    def __len__(self) -> int:
        return self.config.entries

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path.absolute(), self.index)  # a copy maps the same file

    @classmethod
    def build(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        corpus: str | Iterable[str],
        path: str | os.PathLike,
        *,
        index: Index = "flat",
        layer: Layer = "last_mlp",
        key_dtype: Literal["float32", "float16"] = "float32",
        max_entries: int | None = None,
        progress: bool = True,
    ) -> KnnDatastore:
        """Runs the model over a corpus, writes a datastore into a new folder and opens it.

        All keys are held in memory until they are written. Where FAISS is installed, a large
        datastore gets a sketch as well, see [`~KnnDatastore.add_sketch`].

        Args:
            model (`PreTrainedModel`): The model that will look things up here.
            tokenizer (`PreTrainedTokenizerBase`): Its tokenizer, a fast one.
            corpus (`str` or iterable of them): Texts. A long one is read in windows that overlap.
            path (`str` or `Path`): The new folder.
            index (`"flat"` or `"hnsw"`, *optional*, defaults to `"flat"`): See [`KnnDatastore`].
            layer (`"last_mlp"` or `"last_hidden"`, *optional*, defaults to `"last_mlp"`): Which
                hidden state is the key, see [`~ralm.hidden_states.watched`].
            key_dtype (`"float32"` or `"float16"`, *optional*, defaults to `"float32"`): How keys
                are written; float16 takes half of the disk.
            max_entries (`int`, *optional*): Stops where there are that many.
            progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar.

        Raises:
            TypeError: If an entry of the corpus is not a string.
            ValueError: If the corpus has no text, an argument is none that it can be, or the
                model's hidden states are not finite.
            FileExistsError: If there is something at `path`.
        """
        if key_dtype not in KEY_DTYPES:
            raise ValueError(f"key_dtype must be one of {KEY_DTYPES}, but is {key_dtype!r}")
        if max_entries is not None and max_entries < 1:
            raise ValueError(f"max_entries must be at least 1, but is {max_entries}")
        with watched(model, layer):  # a model without the layer is refused before work starts
            pass
        with new_folder(Path(path)) as folder:
            keys, values = _read_corpus(model, tokenizer, corpus, layer, max_entries, progress)
            keys = keys.astype(key_dtype, copy=False)
            _check_keys(keys, key_dtype)
            arrays = {
                "keys": keys.reshape(-1),
                "norms": _squared_lengths(keys),
                "values": values,
                "probe": _probe(model, layer),
            }
            KnnConfig(
                model=str(model.config.name_or_path),
                layer=layer,
                fingerprint=tokenizer_fingerprint(tokenizer),
                vocab_size=model.config.get_text_config(decoder=True).vocab_size,
                entries=len(keys),
                dimension=keys.shape[1],
                key_dtype=key_dtype,
                file=write_arrays(folder / ENTRIES, arrays),
            ).write(folder)
            if len(keys) >= LEAST_ROWS and axes_of(keys.shape[1]) and find_spec("faiss"):
                cls(folder).add_sketch()
        return cls(path, index)

    def add_sketch(self) -> None:
        """Writes a sketch of the keys into the folder: 32 bytes an entry, for better guesses.

        The request cache often lacks the nearest entries, above all where few are looked up. With
        a sketch, speculation looks at all of them in every step. A million takes ten seconds.

        Raises:
            ImportError: If FAISS is not installed (extra `retrieval`).
            ValueError: If there are fewer than 16, or they have one dimension alone.
            DatastoreError: If another process is writing one.
        """
        sketch = Sketch.of(self.keys)
        with only_writer(self.path):
            self.config = replace(self.config, sketch=sketch.write(self.path))
            self.config.write(self.path)
        self.__dict__.pop("sketch", None)  # it is read when it is needed

    @cached_property
    def sketch(self) -> Sketch | None:
        """The sketch, if there is one, FAISS is installed to look into it, and it is of use: to
        walk a graph takes no longer.

        It is read when it is first asked for, but its numbers are not checked: wrong ones give
        wrong guesses, and so the same text more slowly. [`~KnnDatastore.verify`] tells.

        Raises:
            DatastoreError: If its file is damaged, as far as sizes and headers tell.
        """
        if self.config.sketch is None or self.index != "flat" or find_spec("faiss") is None:
            return None
        shape = (self.config.entries, self.config.dimension)
        return Sketch.read(self.path, self.config.sketch, shape)

    def verify(self) -> None:
        """Reads everything and compares it with its checksum.

        Raises:
            DatastoreError: If it is not as it was written.
        """
        for file in filter(None, (self.config.file, self.config.sketch)):
            check_file(self.path, file)

    def check_model(self, model: PreTrainedModel) -> None:
        """Refuses a model that the keys are not from: distances to them would mean nothing.

        Raises:
            ValueError: If its hidden state after a known text is not the one that was written.
        """
        if model in self._known:
            return
        name = type(model).__name__
        config = model.config.get_text_config(decoder=True)
        if config.vocab_size != self.config.vocab_size:
            raise ValueError(
                f"knn_datastore was made with a vocabulary of {self.config.vocab_size}, but this "
                f"{name} has {config.vocab_size}; build one with this model"
            )
        probe = _probe(model, self.config.layer)
        if probe.shape != self._probe.shape:
            raise ValueError(
                f"knn_datastore has keys of {len(self._probe)} numbers, but the hidden states of "
                f"this {name} have {len(probe)}; build one with this model"
            )
        difference = np.linalg.norm(probe - self._probe)
        if not difference <= _PROBE_TOLERANCE * np.linalg.norm(self._probe):
            raise ValueError(
                f"knn_datastore was made with another model ({self.config.model}): this {name} has "
                "other hidden states after the same text; build one with this model"
            )
        self._known[model] = True

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuses a tokenizer that the values are not from.

        Raises:
            ValueError: If it is another one.
        """
        if tokenizer_fingerprint(tokenizer) != self.config.fingerprint:
            raise ValueError(
                f"knn_datastore was made with another tokenizer than {tokenizer.name_or_path}; "
                "build one with this tokenizer"
            )

    def search(self, queries: Sequence[np.ndarray], k: int) -> list[Retrieved]:
        """The `k` nearest entries of each query, or all where there are fewer.

        Args:
            queries (sequence of `np.ndarray`, float32 of shape `(dimension,)`): Hidden states.
            k (`int`): How many entries.

        Returns:
            A list of [`Retrieved`]: the scores are minus the squared distances.

        Raises:
            ValueError: If a query is not finite or of another size.
        """
        batch = np.ascontiguousarray(queries, dtype=np.float32).reshape(len(queries), -1)
        if batch.shape[1] != self.config.dimension or not np.isfinite(batch).all():
            raise ValueError(
                f"queries must be of {self.config.dimension} finite numbers, but are of shape "
                f"{batch.shape}" + ("" if np.isfinite(batch).all() else " with NaN or infinity")
            )
        return self._index.search(batch, k)

    def score(self, query: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """The scores (float32) that `search` gives to the entries `ids`."""
        return self._index.score(query, ids)

    def neighbours(self, ids: np.ndarray) -> np.ndarray:
        """The 10 entries after each of some, as far as there are so many (spatial locality)."""
        following = np.unique(ids[:, None] + np.arange(1, NEIGHBOURS + 1))
        return following[following < len(self)]

    def next_tokens(self, found: Retrieved, temperature: float) -> tuple[np.ndarray, np.ndarray]:
        """What followed the entries that were found (Khandelwal et al. 2020, equation 2).

        Args:
            found ([`Retrieved`]): Neighbours of a hidden state.
            temperature (`float`): Squared distances are divided by it.

        Returns:
            Tokens (int64, ascending) and their probabilities (float64), which sum up to 1.
        """
        scores = found.scores.astype(np.float64) / temperature
        weights = np.exp(scores - scores.max())
        tokens, places = np.unique(self.values[found.ids], return_inverse=True)
        sums = np.bincount(places, weights)
        return tokens.astype(np.int64), sums / sums.sum()


@torch.no_grad()
def _read_corpus(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    corpus: str | Iterable[str],
    layer: Layer,
    max_entries: int | None,
    progress: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Keys `(entries, dimension)` as float32 and values `(entries,)` as int32."""
    keys, values, entries = [], [], 0
    length = context_length(model)
    pieces = windows(tokenized(corpus, tokenizer), length)
    with (
        watched(model, layer) as hidden,
        tqdm(total=max_entries, unit=" tokens", unit_scale=True, disable=not progress) as bar,
    ):
        for batch in batches(pieces, length):
            model.base_model(padded(batch, model.device), use_cache=False)
            assert hidden.states is not None
            states = hidden.states.float().numpy(force=True)
            for window, of_window in zip(batch, states, strict=True):
                predicted = slice(window.known - 1, len(window.ids) - 1)
                keys.append(of_window[predicted].copy())
                values.append(window.ids[window.known :].astype(np.int32))
                entries += len(values[-1])
                bar.update(len(values[-1]))
            if max_entries is not None and entries >= max_entries:
                break
    if entries == 0:
        raise ValueError("corpus has no text of two tokens or more: there is nothing to keep")
    return np.concatenate(keys)[:max_entries], np.concatenate(values)[:max_entries]


def _squared_lengths(keys: np.ndarray) -> np.ndarray:
    """Of the keys as they will be read, `(entries,)` as float32."""
    lengths = np.empty(len(keys), dtype=np.float32)
    for begin in range(0, len(keys), _CHECKED_AT_ONCE):
        some = keys[begin : begin + _CHECKED_AT_ONCE].astype(np.float64)
        lengths[begin : begin + len(some)] = np.einsum("nd,nd->n", some, some)
    return lengths


def _check_keys(keys: np.ndarray, key_dtype: str) -> None:
    for begin in range(0, len(keys), _CHECKED_AT_ONCE):
        if not np.isfinite(keys[begin : begin + _CHECKED_AT_ONCE]).all():
            raise ValueError(
                f"the model's hidden states are not finite as {key_dtype}; "
                + ("is the model damaged?" if key_dtype == "float32" else 'try "float32"')
            )


@torch.no_grad()
def _probe(model: PreTrainedModel, layer: Layer) -> np.ndarray:
    """The model's hidden state after a fixed text, float32 of shape `(dimension,)`."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(1, _PROBE_LENGTH + 1, device=model.device)[None] % vocab_size
    with watched(model, layer) as hidden:
        model.base_model(ids, use_cache=False)
        return hidden.last().float().numpy(force=True)
