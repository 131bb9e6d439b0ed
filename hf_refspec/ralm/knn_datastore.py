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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from threading import get_ident
from typing import Annotated, Any, Literal, TypeAlias, get_args
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..corpus.documents import open_source
from ..corpus.tokenise import Window, windows
from ..corpus.untrusted import printable
from ..notebooks import is_hidden
from ..retrieval.retriever import Retrieved
from ..retrieval.vector_index import Index, index_type, squared_lengths
from ..store.files import FileEntry, new_folder, read_arrays, write_arrays
from ..store.folder_config import FolderConfig
from ..store.stored_folder import StoredFolder
from ..store.stored_tokenizer import public_name
from ..text_config import context_length, text_config, text_tokenizer

_NEXT_ENTRIES = 10
# The largest relative difference between fingerprints of one model. In two number formats they
# differ by a percent or two.
_FINGERPRINT_TOLERANCE = 0.05
ENTRIES = re.compile(r"entries\.safetensors")
_COUNT = range(1, 2**31)
KeyDtype = Literal["float32", "float16"]
Layer: TypeAlias = Literal["last_mlp", "last_hidden"]
_LONGEST = 1024  # tokens of a window
_BATCH_TOKENS = 8192
_FIXED_LENGTH = 8  # tokens of the text that identifies a model


@dataclass(frozen=True)
class KnnConfig(FolderConfig):
    """The config.json of a kNN datastore; all keys have the shape `(entries, dimension)`."""

    NOUN = "kNN datastore"
    FILES = (ENTRIES,)

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

    It is memory-mapped, except that float16 keys are converted to float32. The first call of a
    model makes an int8 copy for exact searches on the CPU, a quarter of the size of float32.

    Args:
        path (`str` or `Path`): The folder.
        index (`"flat"` or `"hnsw"`, *optional*, defaults to `"flat"`): Exact search, on GPUs if
            faiss-gpu finds some; or approximate search in a graph (FAISS, extra `retrieval`), which
            takes minutes to build for a million entries. Either holds a copy of the keys.
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
        self._index = index_type(self.index)(self.keys, norms, "l2", self._threads)

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
        fingerprint = model_fingerprint(model, layer)
        source = open_source(documents, tokenizer, column, pattern)
        with new_folder(path) as folder:
            keys, values = read_documents(
                source.documents, tokenizer, model, layer, max_entries, progress
            )
            entries, dimension = keys.shape
            keys = keys.astype(key_dtype, copy=False)
            norms = squared_lengths(keys)
            if not np.isfinite(norms).all():
                remedy = 'try "float32"' if key_dtype == "float16" else "is the model damaged?"
                raise ValueError(
                    f"the model's hidden states are not finite as {key_dtype}; {remedy}"
                )
            arrays = {"keys": keys, "norms": norms, "values": values}
            arrays["model_fingerprint"] = fingerprint
            KnnConfig.made_for(
                tokenizer,
                model=public_name(model),
                layer=layer,
                vocab_size=text_config(model).vocab_size,
                entries=entries,
                dimension=dimension,
                key_dtype=key_dtype,
                file=write_arrays(folder / "entries.safetensors", arrays),
                source=source.about(corpus_name, license),
            ).write(folder)
        return cls(path)

    def check_model(self, model: PreTrainedModel) -> None:
        """Raises a `ValueError` for any model but the one that computed the keys."""
        if model in self._known:
            return
        config = self.config
        vocab_size = text_config(model).vocab_size
        stored, found = self._fingerprint, model_fingerprint(model, config.layer)
        same = vocab_size == config.vocab_size and found.shape == stored.shape
        largest = _FINGERPRINT_TOLERANCE * np.linalg.norm(stored)
        if not (same and np.linalg.norm(found - stored) <= largest):
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
        """The `k` nearest entries of each query, scored by negative squared distances.

        Queries are hidden states, float32 of shape `(dimension,)`. Raises a ValueError if one is
        not finite or has another size, and a DatastoreError if keys are not finite."""
        batch = np.ascontiguousarray(queries, dtype=np.float32).reshape(len(queries), -1)
        if batch.shape[1] != self.config.dimension or not np.isfinite(batch).all():
            raise ValueError(
                f"queries must be of {self.config.dimension} finite numbers, not {queries!r:.200}"
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
        """The scores (float32, `(n,)`) that `search` returns for `ids` (int64, `(n,)`)."""
        return self._index.score(query, ids)

    def next_entries(self, ids: np.ndarray) -> np.ndarray:
        """The next 10 entries after each of `ids` (int64, `(n,)`), int64 of shape `(m,)`.

        A text that resembles the corpus continues like it (RaLMSpec, section 5.3)."""
        following = np.unique(ids[:, None] + np.arange(1, _NEXT_ENTRIES + 1))
        return following[following < len(self)]

    def next_tokens(self, found: Retrieved, temperature: float) -> tuple[np.ndarray, np.ndarray]:
        """The neighbours' next tokens (int64, `(n,)`, ascending) and their probabilities (float64).

        They sum to 1 (Khandelwal et al. 2020, equation 2)."""
        scores = found.scores.astype(np.float64) / temperature
        weights = np.exp(scores - scores.max())
        tokens, places = np.unique(self.values[found.ids], return_inverse=True)
        sums = np.bincount(places, weights)
        return tokens.astype(np.int64), sums / sums.sum()


class HiddenStates:
    """A layer's states in the last forward pass of the thread that it was made in."""

    states: torch.Tensor  # (batch, length, hidden_size)

    def __init__(self) -> None:
        self._thread = get_ident()

    def take(self, states: torch.Tensor) -> None:
        """Takes the states of a pass, if it is of this thread."""
        if get_ident() == self._thread:
            self.states = states

    def last(self) -> np.ndarray:
        """The state of the first row's last token, float32 of shape `(hidden_size,)`."""
        return self.states[0, -1].float().numpy(force=True).copy()


@contextmanager
def recorded(model: PreTrainedModel, layer: Layer) -> Iterator[HiddenStates]:
    """Records a layer's hidden states in every forward pass of this thread inside the context.

    `"last_mlp"` is the input of the last feed-forward block, after the layer norm (Khandelwal et
    al. 2020, section 5, find it best), and `"last_hidden"` the decoder's output."""
    seen = HiddenStates()

    def before_mlp(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.take(args[0] if args else next(iter(kwargs.values())))

    def after_decoder(_: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        seen.take(output[0])

    for hook in (before_mlp, after_decoder):
        vars(hook)["only_reads"] = True  # measurements of the model's logits stay valid
    if layer == "last_mlp":
        handle = last_mlp(model).register_forward_pre_hook(before_mlp, with_kwargs=True)
    elif layer == "last_hidden":
        handle = model.base_model.register_forward_hook(after_decoder)
    else:
        raise ValueError(f"layer must be one of {get_args(Layer)}, but is {layer!r}")
    try:
        yield seen
    finally:
        handle.remove()


def last_mlp(model: PreTrainedModel) -> nn.Module:
    """The feed-forward block of the last decoder layer."""
    count = text_config(model).num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            mlp = getattr(module[-1], "mlp", None)
            if isinstance(mlp, nn.Module):
                return mlp
    raise ValueError(
        f'layer="last_mlp": {type(model).__name__} has no decoder layers with an `mlp`; pass '
        'layer="last_hidden"'
    )


@torch.no_grad()
def model_fingerprint(model: PreTrainedModel, layer: Layer) -> np.ndarray:
    """A model's hidden state after a fixed text, float32 of shape `(dimension,)`, to know it by."""
    vocab_size = text_config(model).vocab_size
    ids = torch.arange(1, _FIXED_LENGTH + 1, device=model.device)[None] % vocab_size
    with recorded(model, layer) as hidden:
        model.base_model(ids, use_cache=False)
        return hidden.last()


@torch.no_grad()
def read_documents(
    documents: Iterable[Any],
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    layer: Layer,
    max_entries: int | None,
    progress: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """The keys of a corpus, float32 `(entries, dimension)`, and next tokens, int32 `(entries,)`.

    Arguments and errors are as of [`KnnDatastore.build`]."""
    keys = []
    values = []
    entries = 0
    bar = tqdm(total=max_entries, unit=" tokens", unit_scale=True, disable=is_hidden(progress))
    with bar, recorded(model, layer) as hidden:
        for batch, ids in read_windows(model, tokenizer, documents):
            model.base_model(ids, use_cache=False)
            for row, window in enumerate(batch):
                keys.append(hidden.states[row, window.predicted].float().numpy(force=True).copy())
                values.append(window.targets.astype(np.int32))
                entries += len(window.targets)
                bar.update(len(window.targets))
            if max_entries is not None and entries >= max_entries:
                break
    if entries == 0:
        raise ValueError("documents has no text of two tokens or more: there is nothing to keep")
    return np.concatenate(keys)[:max_entries], np.concatenate(values)[:max_entries]


def read_windows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]
) -> Iterator[tuple[list[Window], torch.Tensor]]:
    """Yields batches of texts' windows, of the model's context length or at most 1,024 tokens.

    Their tokens are int64 of shape `(batch, longest)`, padded on the right."""
    length = min(context_length(model) or _LONGEST, _LONGEST)

    def tokenized() -> Iterator[np.ndarray]:
        for text in texts:
            # With the special tokens that a prompt gets.
            yield np.array(tokenizer(text, verbose=False)["input_ids"], dtype=np.int64)

    pieces = windows(tokenized(), length, text_config(model).vocab_size)
    while batch := list(islice(pieces, max(_BATCH_TOKENS // length, 1))):
        rows = [torch.from_numpy(window.ids) for window in batch]
        yield batch, pad_sequence(rows, batch_first=True).to(model.device)
