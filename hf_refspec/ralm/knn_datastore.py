"""The datastore of a kNN-LM: the hidden state before every token of a corpus, and that token.

Entries are in the order of the corpus. See Khandelwal et al. 2020, "Generalization through
Memorization" (arXiv 1911.00172).

    entries.safetensors     keys    float32 or float16, the hidden state after a context
                            norms   float32, the squared length of each key
                            values  int32, the next token
                            model_fingerprint   float32, its hidden state after a fixed text
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args
from weakref import WeakKeyDictionary

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..corpus.documents import open_source
from ..corpus.untrusted import printable
from ..messages import check_count
from ..retrieval.flat import index_type
from ..retrieval.retriever import Retrieved
from ..retrieval.vector_index import Index, check_index, squared_lengths
from ..store.files import FileEntry, read_arrays, write_arrays
from ..store.folder import new_folder
from ..store.stored_folder import FolderConfig, StoredFolder
from ..store.stored_tokenizer import public_name, vocabulary_size
from ..text_config import text_config, text_tokenizer
from ..version import __version__
from .hidden_states import Layer, model_fingerprint, read_documents, recorded

_NEXT_ENTRIES = 10
# The largest relative difference between fingerprints of one model. In two number formats they
# differ by a percent or two.
_FINGERPRINT_TOLERANCE = 0.05
ENTRIES = re.compile(r"entries\.safetensors")
_COUNT = range(1, 2**31)
KeyDtype = Literal["float32", "float16"]


@dataclass(frozen=True)
class KnnConfig(FolderConfig):
    """The config.json of a kNN datastore. A key is the hidden state `layer`; `entries` and
    `dimension` are the shape of all keys."""

    NOUN = "kNN datastore"
    FILES = (ENTRIES,)
    TEMPLATE = "knn_datastore.md"

    model: str
    layer: Layer
    vocab_size: Annotated[int, _COUNT]
    entries: Annotated[int, _COUNT]
    dimension: Annotated[int, _COUNT]
    key_dtype: KeyDtype
    file: Annotated[FileEntry, ENTRIES]
    source: dict[str, Any] = field(default_factory=dict)


class KnnDatastore(StoredFolder[KnnConfig]):
    """A corpus as pairs of hidden state and next token, for [`knn_lm`].

    It is memory-mapped, except that float16 keys are converted to float32 in memory. Opening it
    reads no keys, unless it builds an HNSW graph or copies them to GPUs. The first call of a model
    makes an int8 copy for exact searches on the CPU, a quarter of the size of float32.

    Args:
        path (`str` or `Path`): The folder.
        index (`"flat"` or `"hnsw"`, *optional*, defaults to `"flat"`): Exact search, on GPUs if
            faiss-gpu finds some, which then hold a copy of the keys; or approximate search in a
            graph (FAISS, extra `retrieval`), which takes minutes to build for a million entries
            and holds a copy of the keys.
        threads (`int`, *optional*): As in [`DenseRetriever`].

    Attributes:
        keys (`np.ndarray`, float32 of shape `(entries, dimension)`): Hidden states.
        values (`np.ndarray`, int32 of shape `(entries,)`): The next tokens.

    Raises:
        DatastoreError: If there is no datastore, or it is damaged as far as sizes, headers and
            values tell; [`~KnnDatastore.verify`] reads all.
        ImportError: If FAISS is needed and not installed.
    """

    config_type = KnnConfig

    def __init__(
        self, path: str | os.PathLike, index: Index = "flat", threads: int | None = None
    ) -> None:
        check_index(index, threads)
        self.index: Index = index
        self._threads = threads
        super().__init__(path, index, threads)

    def _open(self, config: KnnConfig) -> None:
        shapes = {
            "keys": (config.key_dtype, (config.entries, config.dimension)),
            "norms": (np.float32, config.entries),
            "values": (np.int32, config.entries),
            "model_fingerprint": (np.float32, config.dimension),
        }
        arrays = read_arrays(self.path, config.file, shapes, check_small=True)
        self.keys = arrays["keys"].astype(np.float32, copy=False)
        self.values = arrays["values"]
        self._fingerprint = arrays["model_fingerprint"]
        norms = arrays["norms"]
        self._known: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
        if self.values.min() < 0 or self.values.max() >= config.vocab_size:
            raise self._damaged(config.file, f"a value is not below {config.vocab_size}")
        if not 0 <= norms.min() <= norms.max() < np.inf:  # NaN neither
            raise self._damaged(config.file, "a squared length is not a number from 0 on")
        self._index = index_type(self.index)(self.keys, norms, "l2")
        self._index.threads = self._threads

    @property
    def search_threads(self) -> int:
        """The threads that a search keeps busy."""
        return self._index.search_threads

    def __repr__(self) -> str:
        held = f"entries={len(self):,}, dimension={self.config.dimension}"
        model = f"model={self.config.model!r}"
        return f"KnnDatastore({str(self.path)!r}, index={self.index!r}, {held}, {model})"

    def __len__(self) -> int:
        return self.config.entries

    @classmethod
    def build(
        cls,
        documents: Any,
        tokenizer: PreTrainedTokenizerBase,
        model: PreTrainedModel,
        path: str | os.PathLike,
        *,
        column: str | None = None,
        pattern: str = "*",
        layer: Layer = "last_mlp",
        key_dtype: KeyDtype = "float32",
        max_entries: int | None = None,
        license: str | None = None,
        corpus_name: str | None = None,
        progress: bool = True,
    ) -> KnnDatastore:
        """Runs the model over documents, writes a datastore into a new folder and opens it.

        Memory must hold all keys until they are written.

        Args:
            documents: As in [`Datastore.build`], but no ids. A long text is read in overlapping
                windows.
            tokenizer (`PreTrainedTokenizerBase`): The model's tokenizer, a fast one.
            model (`PreTrainedModel`): The model that will use the datastore.
            path (`str` or `Path`): The new folder.
            column (`str`, *optional*): As of [`Datastore.build`].
            pattern (`str`, *optional*): As of [`Datastore.build`].
            layer (`"last_mlp"` or `"last_hidden"`, *optional*, defaults to `"last_mlp"`): The
                hidden state that is the key: the input of the last layer's MLP, or the input of
                the output embeddings.
            key_dtype (`"float32"` or `"float16"`, *optional*, defaults to `"float32"`): The type
                of the stored keys; float16 takes half the space.
            max_entries (`int`, *optional*): The most entries.
            license (`str`, *optional*): The documents' licence, by default the dataset's.
            corpus_name (`str`, *optional*): Their name, by default the dataset's or folder's.
            progress (`bool`, *optional*, defaults to `True`): Show a progress bar.

        Raises:
            ValueError: If the documents have no text, an argument is invalid, or the model's hidden
                states are not finite.
            FileExistsError: If there is something at `path`.
        """
        tokenizer = text_tokenizer(tokenizer)
        if key_dtype not in get_args(KeyDtype):
            raise ValueError(f"key_dtype must be one of {get_args(KeyDtype)}, but is {key_dtype!r}")
        if max_entries is not None:
            check_count("max_entries", max_entries, " or None")
        with recorded(model, layer):  # a model without the layer is refused before work starts
            pass
        opened = open_source(documents, tokenizer, vocabulary_size(tokenizer), column, pattern)
        with new_folder(path) as folder:
            keys, values = read_documents(
                opened.documents, tokenizer, model, layer, max_entries, progress
            )
            entries, dimension = keys.shape
            stored = keys.astype(key_dtype, copy=False)
            norms = squared_lengths(stored)
            if not np.isfinite(norms).all():
                remedy = 'try "float32"' if key_dtype == "float16" else "is the model damaged?"
                raise ValueError(
                    f"the model's hidden states are not finite as {key_dtype}; {remedy}"
                )
            arrays = {
                "keys": stored,
                "norms": norms,
                "values": values,
                "model_fingerprint": model_fingerprint(model, layer),
            }
            KnnConfig.made_for(
                tokenizer,
                model=public_name(model),
                layer=layer,
                vocab_size=text_config(model).vocab_size,
                entries=entries,
                dimension=dimension,
                key_dtype=key_dtype,
                file=write_arrays(folder / "entries.safetensors", arrays),
                source={
                    "corpus": corpus_name or opened.name,
                    "license": license or opened.license,
                    "hf_refspec": __version__,
                },
            ).write(folder)
        return cls(path)

    def check_model(self, model: PreTrainedModel) -> None:
        """Refuses any model but the one that computed the keys: a `ValueError` if its hidden state
        after a fixed text is not the stored one."""
        if model in self._known:
            return
        config = self.config
        vocab_size = text_config(model).vocab_size
        found = model_fingerprint(model, config.layer)
        same = vocab_size == config.vocab_size and found.shape == self._fingerprint.shape
        if same:
            difference = np.linalg.norm(found - self._fingerprint)
            same = difference <= _FINGERPRINT_TOLERANCE * np.linalg.norm(self._fingerprint)
        if not same:
            raise ValueError(
                f"knn_datastore was made with another model ({printable(config.model)}, a "
                f"vocabulary of {config.vocab_size}, hidden states of {config.dimension} numbers) "
                f"than this {type(model).__name__} ({vocab_size}, {len(found)}), whose hidden "
                "states after the same text differ; build one with this model"
            )
        # An index makes what it needs in its first search, before text is generated.
        self.search([self._fingerprint], 1)
        self._known[model] = True

    def search(self, queries: Sequence[np.ndarray], k: int) -> list[Retrieved]:
        """The `k` nearest entries of each query (a hidden state, float32 of shape `(dimension,)`),
        or all if there are fewer. Scores are negative squared distances.

        Raises:
            ValueError: If a query is not finite or has another size.
            DatastoreError: If keys are not finite.
        """
        batch = np.ascontiguousarray(queries, dtype=np.float32).reshape(len(queries), -1)
        if batch.shape[1] != self.config.dimension or not np.isfinite(batch).all():
            raise ValueError(
                f"queries must be of {self.config.dimension} finite numbers, but have the shape "
                f"{batch.shape}" + ("" if np.isfinite(batch).all() else " with NaN or infinity")
            )
        damaged = self._damaged(self.config.file, "keys are not finite; build it again")
        try:
            found = self._index.search(batch, k)
        except FloatingPointError as error:
            raise damaged from error
        for neighbours in found:
            if not len(neighbours) or not np.isfinite(neighbours.scores).all():
                raise damaged
        return found

    def score(self, query: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """The scores (float32, `(n,)`) of the entries `ids` (int64, `(n,)`), as `search` returns
        them."""
        return self._index.score(query, ids)

    def next_entries(self, ids: np.ndarray) -> np.ndarray:
        """The next 10 entries after each of `ids` (int64, `(n,)`), int64 of shape `(m,)`: a text
        that resembles the corpus continues like it (RaLMSpec, section 5.3)."""
        following = np.unique(ids[:, None] + np.arange(1, _NEXT_ENTRIES + 1))
        return following[following < len(self)]

    def next_tokens(self, found: Retrieved, temperature: float) -> tuple[np.ndarray, np.ndarray]:
        """The next tokens of a hidden state's neighbours (int64, `(n,)`, ascending), and their
        probabilities (float64, `(n,)`), which sum to 1 (Khandelwal et al. 2020, equation 2)."""
        scores = found.scores.astype(np.float64) / temperature
        weights = np.exp(scores - scores.max())
        tokens, places = np.unique(self.values[found.ids], return_inverse=True)
        sums = np.bincount(places, weights)
        return tokens.astype(np.int64), sums / sums.sum()
