"""A target model's best next tokens after contexts of 1 to n tokens, learned and drafted from."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..check_count import check_count
from .draft_tree import TreeArrays
from .recycling import (
    COMMONEST,
    COUNT,
    MOST_CONTEXT,
    MOST_ENTRIES,
    MOST_NEXT,
    count_tokens,
    enter,
    learn,
    new_table,
)
from .recycling_tree import Pooling, recycling_tree

# Where more tokens are counted, all counts are halved.
_MOST_COUNTED = 1 << 14
_ANY_VOCABULARY = 2**31 - 1
# The counts of another table are scaled down to a total of this: the present text may differ.
_ENTERED_COUNT = 256


@dataclass(frozen=True)
class TableContent:
    """The content of a [`~index.recycling.Table`], the oldest entry first."""

    contexts: np.ndarray
    tokens: np.ndarray
    probs: np.ndarray
    counts: np.ndarray  # float32, (n,), how often each token below n came
    vocab_size: int | None  # the target's; larger tokens are not learned

    def __len__(self) -> int:
        return len(self.contexts)


class NextTokens:
    """A bounded table from the last 1 to n tokens to the target's k best next tokens.

    Args:
        top_k (`int`): k.
        context (`int`): n, from 1 to 3.
        max_contexts (`int`): The most contexts. Each takes 8 k + 28 to 8 k + 36 bytes, once it is
            there.
        content ([`TableContent`], *optional*): What it begins with, of that the newest
            `max_contexts`. A pickle begins with it too, and has nothing that was learned since.

    Attributes:
        vocab_size (`int`, *optional*): The target's; larger tokens are not learned.
    """

    def __init__(
        self, top_k: int, context: int, max_contexts: int, content: TableContent | None = None
    ) -> None:
        check_count("top_k", top_k, most=MOST_NEXT)
        check_count("context", context, most=MOST_CONTEXT)
        check_count("max_contexts", max_contexts, most=MOST_ENTRIES)
        self.top_k = top_k
        self.context = context
        self.max_contexts = max_contexts
        self.vocab_size: int | None = None
        self._content: TableContent | None = None  # of pickles
        self._table = new_table(max_contexts, top_k)
        self._counts = np.zeros(0, dtype=np.float32)
        self._counted = 1.0
        self._commonest = np.full(COMMONEST, -1, dtype=np.int32)
        self._lock = threading.RLock()  # kernels run without Python's own
        if content is not None:
            self.enter(content)

    def __len__(self) -> int:
        return int(self._table.state[COUNT])

    def learn(
        self,
        before: np.ndarray,
        tokens: np.ndarray,
        parents: np.ndarray,
        best_tokens: np.ndarray,
        best_probs: np.ndarray,
    ) -> None:
        """Enters the target's best next tokens after a text and each node of a tree below it, see
        [`~index.recycling.learn`]."""
        entered = 0
        contexts = self.context * (1 + len(tokens))
        with self._lock:
            while True:
                entered = learn(
                    self._table,
                    self.context,
                    self.vocab_size or _ANY_VOCABULARY,
                    before,
                    tokens,
                    parents,
                    best_tokens,
                    best_probs,
                    entered,
                )
                if entered == contexts:
                    return
                self._enter(self.entries(), self.max_contexts * 7 // 8)

    def learn_text(
        self, ids: np.ndarray, known: int, best_tokens: np.ndarray, best_probs: np.ndarray
    ) -> None:
        """Enters the target's best next tokens after the first `known` tokens of a text
        (int64) and after each later one."""
        before = ids[max(known - MOST_CONTEXT, 0) : known].astype(np.int32)
        parents = np.arange(-1, len(ids) - known - 1, dtype=np.int32)
        best_tokens = np.ascontiguousarray(best_tokens)
        best_probs = np.ascontiguousarray(best_probs)
        self.learn(before, ids[known:], parents, best_tokens, best_probs)

    def count(self, tokens: np.ndarray) -> None:
        """Counts tokens (int64) that were emitted."""
        with self._lock:
            if len(tokens) and tokens.max() >= len(self._counts):
                longer = np.zeros(1 << int(tokens.max()).bit_length(), dtype=np.float32)
                longer[: len(self._counts)] = self._counts
                self._counts = longer
            count_tokens(self._counts, self._commonest, tokens)
            self._counted += len(tokens)
            if self._counted > _MOST_COUNTED:
                self._counts *= 0.5
                self._counted *= 0.5

    def tree(
        self,
        text: np.ndarray,
        last_tokens: np.ndarray,
        last_probs: np.ndarray,
        pooling: Pooling,
        budget: int,
        chain: bool,
    ) -> TreeArrays:
        """Grows a draft tree, see [`~index.recycling_tree.recycling_tree`]."""
        with self._lock:
            return recycling_tree(
                self._table,
                self.context,
                text,
                self._commonest,
                self._counts,
                self._counted,
                last_tokens,
                last_probs,
                pooling,
                budget,
                chain,
            )

    def static_tree(self, last: int, budget: int) -> TreeArrays:
        """The published static tree below a token, see [`~index.static_tree.static_tree`]."""
        from .static_tree import static_tree  # loaded only where it is asked for

        with self._lock:
            return static_tree(self._table, last, budget)

    def entries(self) -> TableContent:
        """All entries, the oldest first."""
        with self._lock:
            table = self._table
            order = np.argsort(table.ages[: len(self)])
            contexts, tokens, probs = (each[order] for each in table[:3])
            return TableContent(contexts, tokens, probs, self._counts.copy(), self.vocab_size)

    def keep(self) -> None:
        """Lets pickles begin with what it holds now."""
        self._content = self.entries()

    def _enter(self, entries: TableContent, count: int) -> None:
        """Replaces all entries by the newest `count` of others."""
        newest = slice(max(len(entries) - count, 0), None)
        enter(
            self._table,
            np.ascontiguousarray(entries.contexts[newest]),
            np.ascontiguousarray(entries.tokens[newest]),
            np.ascontiguousarray(entries.probs[newest]),
        )

    def enter(self, content: TableContent) -> None:
        """Begins with what another table held, its newest `max_contexts`."""
        self._content = content
        self.vocab_size = content.vocab_size
        self._enter(content, self.max_contexts)
        total = max(float(content.counts.sum()), 1.0)
        self._counts = content.counts * np.float32(min(1.0, _ENTERED_COUNT / total))
        self._counted = 1.0 + float(self._counts.sum())
        commonest = np.argsort(-self._counts, kind="stable")[:COMMONEST]
        self._commonest[: len(commonest)] = np.where(self._counts[commonest], commonest, -1)

    def __reduce__(self) -> tuple[Any, ...]:
        return NextTokens, (self.top_k, self.context, self.max_contexts, self._content)

    def __deepcopy__(self, _: Any) -> NextTokens:
        twin = NextTokens(self.top_k, self.context, self.max_contexts)
        with self._lock:
            content = self.entries()
            twin._enter(content, self.max_contexts)
            twin._counts, twin._counted = content.counts, self._counted
            twin._commonest = self._commonest.copy()
        twin.vocab_size, twin._content = content.vocab_size, self._content
        return twin
