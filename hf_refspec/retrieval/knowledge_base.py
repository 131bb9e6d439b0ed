"""A knowledge base: passages as tokens, with their embeddings, in a folder or on the Hub.

passages.safetensors    tokens      uint16 or uint32, of all passages in a row
                        bounds      int64, where each begins, and the end
sources.safetensors     documents   int64, which document each passage is from
                        names       uint8, the names of the documents in UTF-8, each ended by a
                                    zero; empty where they are not files
embeddings.safetensors  embeddings  float32, a row for each passage (where there is an encoder)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..store.build.source import Source, batches, open_source
from ..store.build.tokenizing import encode
from ..store.card import cell
from ..store.files import Blocks, DatastoreError, FileEntry, read_arrays, write_arrays
from ..store.fingerprint import public_name, tokenizer_fingerprint, vocabulary_size
from ..store.folder import FolderConfig, new_folder, token_dtype
from ..store.schema import Named, Range
from ..store.stored_folder import StoredFolder
from ..store.tokenizer_file import load_backend
from ..version import __version__
from .text_encoder import TextEncoder

# Texts that the encoder gets at once: enough for it to sort them by length.
_TEXTS_AT_ONCE = 512
# Numbers that are looked at at once, and bytes of the longest path that a system has.
_BLOCK, _LONGEST_NAME = 1 << 20, 1 << 16

PASSAGES = Named("a file of passages", r"passages\.safetensors")
SOURCES = Named("a file of sources", r"sources\.safetensors")
EMBEDDINGS = Named("a file of embeddings", r"embeddings\.safetensors")
_LARGEST = 2**62


@dataclass(frozen=True)
class KnowledgeBaseConfig(FolderConfig):
    """What the config.json of a knowledge base says.

    Attributes:
        vocab_size (`int`): All token ids are below it.
        chunk_length (`int`): The most tokens of a passage.
        passages (`int`): How many.
        tokens (`int`): Of all passages together.
        dimension (`int`): Of the embeddings; 0 where there are none.
        passages_file (`FileEntry`): Where the tokens are.
        sources_file (`FileEntry`): Where it says which documents they are from.
        embeddings_file (`FileEntry`, *optional*): Where the embeddings are.
        source (`dict`): How it was built, for people and for the card.
    """

    NOUN = "knowledge base"
    HEADER: ClassVar[dict[str, Any]] = {"kind": NOUN, "format_version": 1}
    FILES = (PASSAGES, SOURCES, EMBEDDINGS)
    TEMPLATE = "knowledge_base.md"

    vocab_size: Annotated[int, Range(1, 2**31 - 1)]
    chunk_length: Annotated[int, Range(1, 2**31 - 1)]
    passages: Annotated[int, Range(1, _LARGEST)]
    tokens: Annotated[int, Range(1, _LARGEST)]
    dimension: Annotated[int, Range(0, 2**31 - 1)]
    passages_file: Annotated[FileEntry, PASSAGES]
    sources_file: Annotated[FileEntry, SOURCES]
    embeddings_file: Annotated[FileEntry, EMBEDDINGS] | None
    source: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        if (self.dimension == 0) != (self.embeddings_file is None):
            raise ValueError(f"dimension is {self.dimension}, which its embeddings_file belies")

    @property
    def tokenizer_ids(self) -> int:
        return self.vocab_size

    @property
    def token_dtype(self) -> np.dtype:
        """uint16 where it holds all tokens, else uint32."""
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
    """Passages that a language model can be given, see [`DenseRetriever`] and its like.

    It stays on disk, mapped into memory: to open one takes milliseconds, and several processes
    share what they read of it.

    Args:
        path (`str` or `Path`): The folder. See [`~KnowledgeBase.from_pretrained`] for one on the
            Hub.
        tokenizer (`PreTrainedTokenizerBase`): The language model's.

    Attributes:
        path (`Path`): The folder.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer.
        config ([`KnowledgeBaseConfig`]): What its config.json says.
        embeddings (`np.ndarray`, float32 of shape `(passages, d)`, *optional*): A row for each
            passage; `None` where it was built without an encoder.

    Raises:
        DatastoreError: If there is no knowledge base, its files are damaged (as far as their sizes,
            headers and bounds tell; [`~KnowledgeBase.verify`] reads all) or it was made for another
            tokenizer.
    """

    config_type = KnowledgeBaseConfig

    def __init__(self, path: str | os.PathLike, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        super().__init__(path)

    def _open(self, config: KnowledgeBaseConfig) -> None:
        self.config = config
        self.check_tokenizer(self.tokenizer)
        arrays = read_arrays(
            self.path,
            config.passages_file,
            {
                "tokens": (config.token_dtype, config.tokens),
                "bounds": (np.dtype(np.int64), config.passages + 1),
            },
        )
        self._tokens, self._bounds = arrays["tokens"], arrays["bounds"]
        self._check_bounds()
        self._documents, self._names = _read_sources(self.path, config)
        self.embeddings: np.ndarray | None = None
        if config.embeddings_file is not None:
            shape = (config.passages, config.dimension)
            expected = {"embeddings": (np.dtype(np.float32), shape[0] * shape[1])}
            rows = read_arrays(self.path, config.embeddings_file, expected)["embeddings"]
            self.embeddings = rows.reshape(shape)

    def __len__(self) -> int:
        return self.config.passages

    def __repr__(self) -> str:
        dimension = self.config.dimension or None
        tokenizer = f"tokenizer={self.config.tokenizer!r}"
        held = f"passages={len(self):,}, dimension={dimension}"
        return f"KnowledgeBase({str(self.path)!r}, {held}, {tokenizer})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path.absolute(), self.tokenizer)  # a copy maps the same files

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
        corpus: str | None = None,
        progress: bool = True,
    ) -> KnowledgeBase:
        """Builds a knowledge base in a new folder, all of it or nothing, and opens it.

        A document that is too long is cut into passages of about the same length.

        Args:
            documents: A `datasets` dataset (map-style or streaming) with a column of texts; a text
                file, a folder, or a list of both; or an iterable of texts.
            tokenizer (`PreTrainedTokenizerBase`): The language model's, a fast one.
            encoder (`str`, `Path`, `SentenceTransformer` or callable, *optional*): The folder or
                Hub id of a sentence-transformers model, or see [`TextEncoder`]; `None` for a
                knowledge base that only [`SparseRetriever`] searches.
            path (`str` or `os.PathLike`): The folder to make.
            chunk_length (`int`, *optional*, defaults to 256): The most tokens of a passage.
            column (`str`, *optional*): The dataset's column; by default `"text"` or the only one of
                strings.
            pattern (`str`, *optional*, defaults to `"*"`): Which files below a folder, as `"*.md"`.
            license (`str`, *optional*): Of the documents. By default what the dataset says.
            corpus (`str`, *optional*): What they are called. By default the dataset or the folder.
            progress (`bool`, *optional*, defaults to `True`): Show progress bars.

        Raises:
            FileExistsError: If there is something at `path`.
            ValueError: If there is no token in all documents, one of them is no document, or the
                encoder returns something other than a finite vector for each text, or is none.
            RuntimeError: If the encoder fails.
            OSError: If it cannot be written.
        """
        if type(chunk_length) is not int or chunk_length < 1:
            raise ValueError(
                f"chunk_length must be a number of tokens, at least 1, but is {chunk_length!r}"
            )
        texts = None if encoder is None else TextEncoder(encoder)
        opened = open_source(documents, tokenizer, vocabulary_size(tokenizer), column, pattern)
        opened.name, opened.license = corpus or opened.name, license or opened.license
        with new_folder(Path(path)) as folder:
            _write(folder, opened, tokenizer, texts, chunk_length, progress)
        return cls(path, tokenizer)

    def passage(self, passage_id: int) -> np.ndarray:
        """The tokens of a passage, int64 of shape `(n,)`.

        Raises:
            IndexError: If there is no such passage.
            DatastoreError: If it has tokens that the tokenizer does not have.
        """
        if not 0 <= passage_id < len(self):
            raise IndexError(
                f"there is no passage {passage_id}; {self.path} has {len(self)} from 0 on"
            )
        begin, end = self._bounds[passage_id : passage_id + 2]
        tokens = self._tokens[begin:end].astype(np.int64)
        if tokens.max() >= self.config.vocab_size:
            raise DatastoreError(
                f"{self.path} is damaged: passage {passage_id} has the token {tokens.max()}, but "
                f"the ids are below {self.config.vocab_size}"
            )
        return tokens

    def text(self, passage_id: int) -> str:
        """The text of a passage.

        Raises:
            IndexError, DatastoreError: As [`~KnowledgeBase.passage`].
        """
        return _decode(self.tokenizer, self.passage(passage_id))

    def source(self, passage_id: int) -> str:
        """Where a passage is from: `"docs/guide.md, line 120"` for a file, which is named as it was
        when the knowledge base was built, or from the folder on that was named by an absolute path;
        `"document 7, line 1"` for the eighth row of a dataset, or the eighth text.

        The line is left out where the tokenizer does not keep the ends of lines; to find it, the
        document is decoded up to the passage.

        Raises:
            IndexError, DatastoreError: As [`~KnowledgeBase.passage`].
        """
        passage = self.text(passage_id)
        document = int(self._documents[passage_id])
        name = _name(self._names, document) or f"document {document}"
        if not self._keeps_lines:
            return name
        first = int(np.searchsorted(self._documents, document))
        before = "".join(self.text(i) for i in range(first, passage_id))
        blank = passage[: len(passage) - len(passage.lstrip())]
        return f"{name}, line {1 + before.count(chr(10)) + blank.count(chr(10))}"

    @cached_property
    def _keeps_lines(self) -> bool:
        ids = self.tokenizer("a\nb", add_special_tokens=False)["input_ids"]
        return _decode(self.tokenizer, np.array(ids, np.int64)) == "a\nb"

    def _check_bounds(self) -> None:
        bounds, most = self._bounds, self.config.chunk_length
        whole = bounds[0] == 0 and bounds[-1] == self.config.tokens
        if not whole or not all(low >= 1 and high <= most for low, high in _steps(bounds)):
            raise DatastoreError(
                f"{self.path / self.config.passages_file.name} is damaged: its bounds are not "
                f"those of passages of 1 to {most} tokens"
            )


def _steps(numbers: np.ndarray) -> Iterator[tuple[int, int]]:
    """The smallest and the largest difference between a number and the one before it, of some of
    them at a time: there can be more than fit into memory."""
    for begin in range(0, len(numbers) - 1, _BLOCK):
        steps = np.diff(numbers[begin : begin + _BLOCK + 1])
        yield int(steps.min()), int(steps.max())


def _read_sources(folder: Path, config: KnowledgeBaseConfig) -> tuple[np.ndarray, np.ndarray]:
    """Which document each passage is from, ascending, and the names of all documents, if they have
    any, as they stand in the file."""
    expected: dict[str, tuple[np.dtype, int | None]] = {
        "documents": (np.dtype(np.int64), config.passages),
        "names": (np.dtype(np.uint8), None),
    }
    arrays = read_arrays(folder, config.sources_file, expected)
    documents, names = arrays["documents"], arrays["names"]
    in_order = documents[0] >= 0 and all(low >= 0 for low, _ in _steps(documents))
    if not in_order or (len(names) and _name(names, int(documents[-1])) is None):
        raise DatastoreError(
            f"{folder / config.sources_file.name} is damaged: its documents are not those that the "
            "passages were cut from, in their order"
        )
    return documents, names


def _name(names: np.ndarray, document: int) -> str | None:
    """The name of a document; there can be millions, of which only this one becomes a `str`."""
    for begin in range(0, len(names), _BLOCK):
        ends = names[begin : begin + _BLOCK] == 0
        count = int(np.count_nonzero(ends))
        if document < count:
            end = begin + int(np.flatnonzero(ends)[document])
            before = names[max(end - _LONGEST_NAME, 0) : end].tobytes()
            return before[before.rfind(b"\0") + 1 :].decode("utf-8", errors="replace")
        document -= count
    return None


def _write(
    folder: Path,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    encoder: TextEncoder | None,
    chunk_length: int,
    progress: bool,
) -> None:
    """Writes all of a knowledge base into a folder."""
    tokens, bounds, documents = _passages(source, tokenizer, chunk_length, progress)
    arrays = {"tokens": tokens, "bounds": bounds}
    passages_file = write_arrays(folder / "passages.safetensors", arrays)
    names = "".join(f"{file}\0" for file in source.files or ())
    as_bytes = np.frombuffer(names.encode("utf-8", errors="replace"), np.uint8)
    sources = {"documents": documents, "names": as_bytes}
    sources_file = write_arrays(folder / "sources.safetensors", sources)
    dimension, embeddings_file = 0, None
    if encoder is not None:
        rows = _embedded(encoder, tokenizer, tokens, bounds, progress)
        first = next(rows)
        dimension, path = first.shape[1], folder / "embeddings.safetensors"
        count = (len(bounds) - 1) * dimension
        embeddings = Blocks(np.dtype(np.float32), count, chain([first], rows))
        embeddings_file = write_arrays(path, {"embeddings": embeddings})
    KnowledgeBaseConfig(
        fingerprint=tokenizer_fingerprint(tokenizer),
        tokenizer=public_name(tokenizer),
        vocab_size=vocabulary_size(tokenizer),
        chunk_length=chunk_length,
        passages=len(bounds) - 1,
        tokens=len(tokens),
        dimension=dimension,
        passages_file=passages_file,
        sources_file=sources_file,
        embeddings_file=embeddings_file,
        source={
            "corpus": source.name,
            "license": source.license,
            "encoder": encoder and encoder.name,
            "hf_refspec": __version__,
        },
    ).write(folder)


def _passages(
    source: Source, tokenizer: PreTrainedTokenizerBase, chunk_length: int, progress: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokenises documents and cuts them: all tokens in a row, where each passage begins, and which
    document it is from."""
    dtype = token_dtype(vocabulary_size(tokenizer), separator=False)
    backend = load_backend(tokenizer.backend_tokenizer.to_str())
    tokens: list[np.ndarray] = []
    lengths: list[int] = []
    passages_of: list[int] = []  # each document
    with tqdm(
        desc="reading", unit=" documents", total=source.total, disable=not progress or None
    ) as bar:
        for batch in batches(source.documents):
            separated, in_a_row = encode(backend, batch, dtype, separator=0)
            # Each document that is not empty has a separator after it, which is not wanted here.
            ends = np.cumsum(separated[separated > 0])
            tokens.append(np.delete(in_a_row, ends - 1))
            for length in separated.tolist():
                parts = _even_parts(length - 1, chunk_length) if length else []
                lengths += parts
                passages_of.append(len(parts))
            bar.update(len(batch))
    if not lengths:
        raise ValueError("documents has no token in it: there is nothing to retrieve")
    documents = np.repeat(np.arange(len(passages_of), dtype=np.int64), passages_of)
    return np.concatenate(tokens), np.cumsum([0, *lengths], dtype=np.int64), documents


def _even_parts(length: int, most: int) -> list[int]:
    """As few parts of at most `most` as make up `length`, all of about the same length."""
    count = -(-length // most)
    return [length // count + (part < length % count) for part in range(count)]


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: np.ndarray) -> str:
    text = tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False)
    return str(text)


def _embedded(
    encoder: TextEncoder,
    tokenizer: PreTrainedTokenizerBase,
    tokens: np.ndarray,
    bounds: np.ndarray,
    progress: bool,
) -> Iterator[np.ndarray]:
    """The embeddings of the passages, some at a time."""
    count, dimension = len(bounds) - 1, None
    with tqdm(desc="embedding", unit=" passages", total=count, disable=not progress or None) as bar:
        for first in range(0, count, _TEXTS_AT_ONCE):
            edges = bounds[first : first + _TEXTS_AT_ONCE + 1].tolist()
            texts = [_decode(tokenizer, tokens[begin:end]) for begin, end in pairwise(edges)]
            vectors = encoder.passages(texts)
            dimension = dimension or vectors.shape[1]
            if vectors.shape[1] != dimension:
                raise ValueError(
                    f"encoder returned vectors of dimension {dimension}, and then of "
                    f"{vectors.shape[1]}; all must have the same"
                )
            yield vectors
            bar.update(len(texts))
