"""How long drafting alone takes, over the length of the context and the size of what is searched.

The text is the standard library's, which every machine has. As in a call of `generate`, the drafter
is told the next token of a text, drafts, is told the next one, and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from ..demo import corpus
from ..drafting.candidates import CandidateChain
from ..drafting.datastore_drafts import DatastoreDrafts
from ..drafting.drafter import Drafter
from ..drafting.reference_copy import ReferenceCopy
from ..drafting.sessions.retrieval_cache import RetrievalCache
from ..drafting.tree import DraftTree
from ..store.datastore import Datastore
from .ways import LOOK_UP, LOOK_UP_TOKENS

CONTEXTS = (256, 1024, 4096, 16384)
STORES = (2**17, 2**19, 2**21)
PROMPT = 256  # where the text to draft from is elsewhere
DRAFTS, NODES = 64, 64
COMPACT_BYTES = 5_000_000
CONTEXT, CACHE = "ReferenceCopy", "RetrievalCache"
OF_CONTEXT = (LOOK_UP, CONTEXT)
FULL, REST, COMPACT = (f"DatastoreDrafts, {form}" for form in ("mixed", "REST", "compact"))


@dataclass(frozen=True)
class Point:
    """A drafter and how many tokens it drafts from."""

    drafter: str
    tokens: int

    @property
    def id(self) -> str:
        return f"{self.drafter}, {self.tokens} tokens"


def latency_points() -> list[Point]:
    """All that is measured."""
    contexts = [Point(drafter, tokens) for drafter in OF_CONTEXT for tokens in CONTEXTS]
    stores = [Point(kind, size) for kind in (CACHE, FULL, REST, COMPACT) for size in STORES]
    return contexts + stores


def measure_latency(point: Point, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The seconds of each of some drafts, as plain types."""
    length = point.tokens if point.drafter in OF_CONTEXT else PROMPT
    unseen = np.concatenate(_first_tokens(corpus.heldout_files(), tokenizer, length + DRAFTS))
    with _drafter(point, tokenizer) as drafter:
        _seconds(drafter, unseen[: length + 2], length, len(tokenizer))  # compiles
        seconds = _seconds(drafter, unseen, length, len(tokenizer))
    return {"drafter": point.drafter, "tokens": point.tokens, "seconds": seconds}


def _seconds(drafter: Drafter, text: np.ndarray, length: int, vocab_size: int) -> list[float]:
    """How long each step takes: to hear of a token, and to draft after at least `length`."""
    drafter.begin(text[: length - 1], vocab_size)
    seconds = []
    for i in range(length, len(text)):
        began = perf_counter()
        drafter.observe(text[i - 1 : i], DraftTree.empty(), None)
        drafter.draft(NODES)
        seconds.append(perf_counter() - began)
    return seconds


@contextmanager
def _drafter(point: Point, tokenizer: PreTrainedTokenizerBase) -> Iterator[Drafter]:
    if point.drafter == LOOK_UP:
        yield CandidateChain(PromptLookupCandidateGenerator(LOOK_UP_TOKENS, max_length=2**31))
        return
    if point.drafter == CONTEXT:
        yield ReferenceCopy()
        return
    documents = _first_tokens(corpus.training_files(), tokenizer, point.tokens)
    if point.drafter == CACHE:
        cache = RetrievalCache(top_k=0)
        for ids in documents:
            cache.add(ids[: len(ids) // 2 + 1], ids[-1:] if len(ids) < 2 else ids[len(ids) // 2 :])
        cache._memory.wait()  # calls come faster here than they can be sorted, as none do in use
        cache.close()
        yield cache
        return
    with TemporaryDirectory() as folder:
        full, compact = Path(folder) / "full", Path(folder) / "compact"
        store = Datastore.build(documents, tokenizer, full, progress=False, num_proc=1)
        if point.drafter == COMPACT:
            store = store.compact(compact, max_bytes=COMPACT_BYTES, progress=False)
        yield DatastoreDrafts(store, mode="rest" if point.drafter == REST else "mixed")


def _first_tokens(
    files: Iterable[Path], tokenizer: PreTrainedTokenizerBase, count: int
) -> list[np.ndarray]:
    """The files as ids, one array each, up to `count` tokens in all."""
    documents = []
    for path in files:
        ids = tokenizer(corpus.read_source(path), add_special_tokens=False)["input_ids"][:count]
        documents.append(np.array(ids, dtype=np.int64))
        count -= len(ids)
        if count == 0:
            break
    return [document for document in documents if len(document)]
