"""A knowledge base: passages as tokens, with their embeddings, in a folder or on the Hub.

passages.safetensors    tokens      uint16 or uint32, of all passages one after another
                        bounds      int64, where each passage begins, and the end of the last one
embeddings.safetensors  embeddings  float32, a row for each passage (if there is an encoder)
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from typing import Annotated, Any

import numpy as np
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..corpus.documents import Source, open_source
from ..corpus.tokenise import vocabulary_size
from ..kernels.compilation import usable_cores
from ..messages import check_ids, require
from ..notebooks import is_hidden
from ..store.files import Blocks, FileEntry, new_folder, read_arrays, write_arrays
from ..store.folder_config import FolderConfig, token_dtype
from ..store.hub import cell
from ..store.names import model_source
from ..store.stored_folder import StoredFolder
from ..store.stored_tokenizer import public_name
from ..text_config import text_tokenizer

# Texts passed to the encoder at once, enough for it to sort them by length.
_TEXTS_AT_ONCE = 512

PASSAGES = re.compile(r"passages\.safetensors")
EMBEDDINGS = re.compile(r"embeddings\.safetensors")
_COUNT = range(1, 2**62 + 1)


@dataclass(frozen=True)
class KnowledgeBaseConfig(FolderConfig):
    """The config.json of a knowledge base, all of whose passages together have `tokens` tokens."""

    NOUN = "knowledge base"
    FILES = (PASSAGES, EMBEDDINGS)
    HAS_TOKENIZERS_IDS = True

    vocab_size: Annotated[int, range(1, 2**31)]
    chunk_length: Annotated[int, range(1, 2**31)]
    passages: Annotated[int, _COUNT]
    tokens: Annotated[int, _COUNT]
    dimension: Annotated[int, range(2**31)]
    passages_file: Annotated[FileEntry, PASSAGES]
    embeddings_file: Annotated[FileEntry, EMBEDDINGS] | None
    source: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        if (self.dimension == 0) != (self.embeddings_file is None):
            raise ValueError(f"dimension is {self.dimension}, unlike its embeddings_file")

    @property
    def token_dtype(self) -> np.dtype:
        """uint16 if it holds every token id, otherwise uint32."""
        return token_dtype(self.vocab_size, separator=False)

    def card_texts(self) -> dict[str, str]:
        if self.embeddings_file is None:
            return {"embeddings": "none: for BM25 only", "retriever": "SparseRetriever(passages)"}
        encoder = cell(self.source.get("encoder") or "not stated")
        return {
            "embeddings": f"of {self.dimension} numbers, by the encoder {encoder}",
            "retriever": "DenseRetriever(passages, encoder)",
        }


class KnowledgeBase(StoredFolder[KnowledgeBaseConfig]):
    """Passages to retrieve for a language model, see [`DenseRetriever`] and [`SparseRetriever`].

    It is memory-mapped: it opens in milliseconds, and processes share its memory.

    Args:
        path (`str` or `Path`): The folder. See [`~KnowledgeBase.from_pretrained`] for one on the
            Hub.
        tokenizer (`PreTrainedTokenizerBase`): The language model's.

    Attributes:
        embeddings (`np.ndarray`, float32 of shape `(passages, d)`, *optional*): A row for each
            passage; `None` if it was built without an encoder.

    Raises:
        DatastoreError: If there is no knowledge base, it was made for another tokenizer, or its
            sizes, headers or bounds are damaged; [`~KnowledgeBase.verify`] reads all.
    """

    config_type = KnowledgeBaseConfig

    def __init__(self, path: str | os.PathLike, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer: PreTrainedTokenizerBase = text_tokenizer(tokenizer)
        super().__init__(path, self.tokenizer)

    def _open(self, config: KnowledgeBaseConfig) -> None:
        self.check_tokenizer(self.tokenizer)
        shapes = {
            "tokens": (config.token_dtype, config.tokens),
            "bounds": (np.int64, config.passages + 1),
        }
        arrays = read_arrays(self.path, config.passages_file, shapes, check_small=True)
        self._tokens, self._bounds = arrays["tokens"], arrays["bounds"]
        bounds = self._bounds
        lengths = np.diff(bounds)
        whole = bounds[0] == 0 and bounds[-1] == config.tokens
        if not (whole and 1 <= lengths.min() <= lengths.max() <= config.chunk_length):
            reason = f"its bounds do not cut it into passages of 1 to {config.chunk_length} tokens"
            raise self._damaged(config.passages_file, reason)
        self.embeddings: np.ndarray | None = None
        if config.embeddings_file is not None:
            rows = {"embeddings": (np.float32, (config.passages, config.dimension))}
            arrays = read_arrays(self.path, config.embeddings_file, rows, check_small=True)
            self.embeddings = arrays["embeddings"]

    def __len__(self) -> int:
        return self.config.passages

    def __repr__(self) -> str:
        dimension = self.config.dimension or None
        tokenizer = f"tokenizer={self.config.tokenizer!r}"
        held = f"passages={len(self):,}, dimension={dimension}"
        return f"KnowledgeBase({str(self.path)!r}, {held}, {tokenizer})"

    @classmethod
    def build(
        cls,
        documents: Any,
        tokenizer: PreTrainedTokenizerBase,
        encoder: Any,
        path: str | os.PathLike,
        *,
        chunk_length: int = 256,
        column: str | None = None,
        pattern: str = "*",
        license: str | None = None,
        corpus_name: str | None = None,
        progress: bool = True,
    ) -> KnowledgeBase:
        """Builds a knowledge base in a new folder and opens it.

        A long document is cut into passages of about the same length.

        Args:
            documents: As of [`Datastore.build`].
            tokenizer (`PreTrainedTokenizerBase`): The language model's, a fast one.
            encoder (`str`, `Path`, `SentenceTransformer` or callable, *optional*): The folder or
                Hub id of a sentence-transformers model, or see [`TextEncoder`]; `None` for a
                knowledge base that only [`SparseRetriever`] searches.
            path (`str` or `os.PathLike`): The new folder.
            chunk_length (`int`, *optional*, defaults to 256): The most tokens of a passage.
            column (`str`, *optional*): As of [`Datastore.build`].
            pattern (`str`, *optional*, defaults to `"*"`): As of [`Datastore.build`].
            license (`str`, *optional*): The documents' licence, by default the dataset's.
            corpus_name (`str`, *optional*): Their name, by default the dataset's or folder's.
            progress (`bool`, *optional*, defaults to `True`): Show progress bars.

        Raises:
            FileExistsError: If there is something at `path`.
            ValueError: If the documents have no token, one of them is invalid, or the encoder
                returns anything but a finite vector for each text.
            OSError: If the folder cannot be written.
        """
        embedder = None if encoder is None else TextEncoder(encoder)
        tokenizer = text_tokenizer(tokenizer)
        source = open_source(documents, tokenizer, column, pattern)
        about = {"encoder": embedder and embedder.name, **source.about(corpus_name, license)}
        with new_folder(path) as folder:
            tokens, bounds = _cut_passages(source, tokenizer, chunk_length, progress)
            count = len(bounds) - 1
            dimension = 0
            embeddings_file = None
            if embedder is not None:
                rows = _embedded(embedder, tokenizer, tokens, bounds, progress)
                first = next(rows)
                dimension = first.shape[1]
                blocks = Blocks(np.dtype(np.float32), count * dimension, chain([first], rows))
                file = folder / "embeddings.safetensors"
                embeddings_file = write_arrays(file, {"embeddings": blocks})
            passages = {"tokens": tokens, "bounds": bounds}
            KnowledgeBaseConfig.made_for(
                tokenizer,
                vocab_size=vocabulary_size(tokenizer),
                chunk_length=chunk_length,
                passages=count,
                tokens=len(tokens),
                dimension=dimension,
                passages_file=write_arrays(folder / "passages.safetensors", passages),
                embeddings_file=embeddings_file,
                source=about,
            ).write(folder)
        return cls(path, tokenizer)

    def passage(self, passage_id: int) -> np.ndarray:
        """The tokens of a passage, int64 of shape `(n,)`; raises a DatastoreError if damaged."""
        begin, end = self._bounds[passage_id : passage_id + 2]
        tokens = self._tokens[begin:end].astype(np.int64)
        if tokens.max() >= self.config.vocab_size:
            reason = f"passage {passage_id} has the token {tokens.max()}, but the ids are below "
            raise self._damaged(self.config.passages_file, reason + str(self.config.vocab_size))
        return tokens

    def check(self, vocab_size: int) -> None:
        """Raises a ValueError if a token of a passage is not below a model's `vocab_size`."""
        # A tokenizer may have more ids than its model, if no passage has them.
        if self.config.vocab_size > vocab_size:
            remedy = "build it of texts without that token, or for this model"
            check_ids(self.path, self._largest_id, vocab_size, remedy)

    @cached_property
    def _largest_id(self) -> int:
        return int(self._tokens.max())

    def text(self, passage_id: int) -> str:
        """The text of a passage; raises as [`~KnowledgeBase.passage`]."""
        return _decode(self.tokenizer, self.passage(passage_id))


def _cut_passages(
    source: Source, tokenizer: PreTrainedTokenizerBase, chunk_length: int, progress: bool
) -> tuple[np.ndarray, np.ndarray]:
    """All tokens `(tokens,)` of documents, and the bounds of their passages `(passages + 1,)`."""
    dtype = token_dtype(vocabulary_size(tokenizer), separator=False)
    tokens: list[np.ndarray] = []
    lengths: list[int] = []
    with source.read_ids(tokenizer, dtype, usable_cores(), progress) as read:
        for ids in read:
            tokens.append(ids)
            # As few passages as possible, of about equal length.
            count = -(-len(ids) // chunk_length)
            lengths += [len(ids) // count + (i < len(ids) % count) for i in range(count)]
    if not lengths:
        raise ValueError("documents has no token in it: there is nothing to retrieve")
    return np.concatenate(tokens), np.cumsum([0, *lengths], dtype=np.int64)


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: np.ndarray) -> str:
    return str(tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False))


def _embedded(
    encoder: TextEncoder,
    tokenizer: PreTrainedTokenizerBase,
    tokens: np.ndarray,
    bounds: np.ndarray,
    progress: bool,
) -> Iterator[np.ndarray]:
    """Yields the embeddings of the passages, float32 `(n, d)`, of tokens cut at `bounds`."""
    count = len(bounds) - 1
    with tqdm(desc="embedding", unit=" passages", total=count, disable=is_hidden(progress)) as bar:
        for first in range(0, count, _TEXTS_AT_ONCE):
            edges = bounds[first : first + _TEXTS_AT_ONCE + 1].tolist()
            texts = [_decode(tokenizer, tokens[begin:end]) for begin, end in pairwise(edges)]
            yield encoder.passages(texts)
            bar.update(len(texts))


class TextEncoder:
    """An encoder of texts: a callable, or a model of the library sentence-transformers.

    A model's `encode_document` and `encode_query` are called if it has them.

    Args:
        encoder (`str`, `Path`, `SentenceTransformer` or callable): The folder or the Hub id of a
            sentence-transformers model, such a model, or a callable that takes a list of texts and
            returns an array of shape `(len(texts), d)`, a row for each. The similarity of two texts
            is the inner product of their rows.

    Attributes:
        name (`str`): A name for cards.
    """

    def __init__(self, encoder: Any) -> None:
        self.name = getattr(encoder, "__name__", type(encoder).__name__)
        if isinstance(encoder, str | os.PathLike):
            self.name = public_name(os.fspath(encoder))
            encoder = load_encoder(encoder)
        self._encode_passages = self._encode_queries = encoder
        self._options = {}
        if hasattr(encoder, "encode"):
            self._encode_passages = getattr(encoder, "encode_document", encoder.encode)
            self._encode_queries = getattr(encoder, "encode_query", encoder.encode)
            self._options = {"show_progress_bar": False, "convert_to_numpy": True}

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        """The vectors of passages, float32 of shape `(len(texts), d)`."""
        return self._checked(self._encode_passages, list(texts))

    def query(self, text: str, dimension: int) -> np.ndarray:
        """The vector of a query, float32 of shape `(dimension,)`; raises as `passages`."""
        (vector,) = self._checked(self._encode_queries, [text])
        if len(vector) != dimension:
            raise ValueError(
                f"encoder returns vectors of dimension {len(vector)}, but the knowledge base has "
                f"vectors of {dimension}; use the encoder that it was built with"
            )
        return vector

    def _checked(self, encode: Any, texts: list[str]) -> np.ndarray:
        returned = encode(texts, **self._options)
        if type(returned).__module__.startswith("torch"):  # numpy knows no bfloat16
            returned = returned.float().numpy(force=True)
        vectors = np.ascontiguousarray(returned, dtype=np.float32)
        if vectors.shape[:-1] != (len(texts),) or not np.isfinite(vectors).all():
            raise ValueError(
                f"encoder must return finite numbers of the shape ({len(texts)}, d) for "
                f"{len(texts)} texts, but returned {returned!r:.200}"
            )
        return vectors


def load_encoder(name: str | os.PathLike) -> Any:
    """The sentence-transformers model in a folder, or of a Hub id."""
    library = require("sentence_transformers", f"the encoder {name}", "retrieval")
    name = os.fspath(name)
    options = model_source(name, "model", ["config.json", "modules.json"])
    return library.SentenceTransformer(name, local_files_only=options["local_files_only"])
