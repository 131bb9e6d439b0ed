"""The new tokens that also occur in the texts that a drafter copies from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..index.llma import llma_span
from ..index.suffix_array import DEPTH, IndexedText, find_suffixes
from ..index.token_buffer import TokenBuffer
from .token_ids import common_length

SHORTEST = 5  # tokens of a span
_BLOCK = 1 << 20  # tokens that are searched for boundaries at a time


@dataclass(frozen=True)
class CopiedSpan:
    """New tokens of a row that occur one after another in a source.

    Attributes:
        start, end (`int`): Their range in the row's new tokens, the end exclusive.
        source (`str`): `"references"`, `"prompt"`, `"sessions"`, or the path of a datastore.
        document (`int`): Which of the references, of [`Datastore.iter_documents`], or of the
            sessions when the call began (each a prompt and its output, the oldest first).
        offset (`int`): Their first place in the document, in tokens.
        row (`int`): The row of the call.
    """

    start: int
    end: int
    source: str
    document: int
    offset: int
    row: int


@dataclass(frozen=True)
class _SourceText:
    """A source's documents, in one part or more; a negative token or a separator ends each."""

    source: str
    parts: Sequence[np.ndarray | IndexedText]

    def runs(self, output: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """The runs of an output (int32 of shape `(n,)`) that occur here and are not inside of
        longer ones: their start, their end, and the first place of each in all parts."""
        before = 0
        for part in self.parts:
            tokens, boundary = _tokens_of(part)
            searched = np.where(output == boundary, -2, output)
            end = SHORTEST
            if not isinstance(part, IndexedText):
                boundary = max(tokens.max(initial=0), output.max(initial=0)) + 1
                buffer = TokenBuffer()
                buffer.extend(np.where(tokens < 0, boundary, tokens))  # a match may end there
            while end <= len(output):  # finds a place after the longest end of the output so far
                if isinstance(part, IndexedText):
                    found = find_suffixes(part, searched[max(end - DEPTH, 0) : end], SHORTEST)
                    low, high = found[-1] if len(found) else (0, 0)
                    first = part.suffixes[low:high].min(initial=len(tokens))
                    place = min(max(int(first), 0) + SHORTEST - 1 + len(found), len(tokens))
                else:
                    place, _ = llma_span(buffer.text, searched[:end], SHORTEST, 0)
                # An index may be damaged, and knows no match above DEPTH: the tokens decide.
                back = common_length(tokens[:place][::-1][:end], searched[:end][::-1])
                ahead = common_length(tokens[place:], searched[end:])
                if back + ahead >= SHORTEST:
                    yield end - back, end + ahead, before + place - back
                end += ahead + 1
            before += len(tokens)

    def document_at(self, place: int) -> tuple[int, int]:
        """The number of the document at a place, and where in the document the place is."""
        number = int(np.searchsorted(self._ends, place))
        return number, place - (int(self._ends[number - 1]) + 1 if number else 0)

    @cached_property
    def _ends(self) -> np.ndarray:
        ends = []
        before = 0
        for tokens, boundary in map(_tokens_of, self.parts):
            for block in np.array_split(tokens, len(tokens) // _BLOCK + 1):
                ends.append(before + np.flatnonzero(block == boundary))
                before += len(block)
        return np.concatenate(ends)


def _tokens_of(part: np.ndarray | IndexedText) -> tuple[np.ndarray, int]:
    """The tokens of a part, and which ends a document."""
    return (part.tokens, part.separator) if isinstance(part, IndexedText) else (part, -1)


def copied_spans(row: int, output: Sequence[int], sources: Sequence[Any]) -> list[CopiedSpan]:
    """A row's spans: the longest run, and recursively the longest ones before and after it.

    Of equal runs the one of the first source counts; `sources` are their names and parts."""
    tokens = np.array(output, np.int32)
    texts = [_SourceText(name, parts) for name, parts in sources]
    spans: list[CopiedSpan] = []
    runs: list[tuple[int, int, int, int]] = []
    for number, text in enumerate(texts):
        reached = 0
        for start, stop, place in sorted(text.runs(tokens), key=lambda run: (run[0], -run[1])):
            if stop > reached:  # not inside of another run of this source
                runs.append((start, stop, place, number))
                reached = stop
    pieces = [(0, len(tokens), runs)]
    while pieces:
        begin, end, runs = pieces.pop()
        runs = [
            (max(start, begin), min(stop, end), place + max(begin - start, 0), number)
            for start, stop, place, number in runs
            if min(stop, end) - max(start, begin) >= SHORTEST
        ]
        if runs:
            best = max(runs, key=lambda run: (run[1] - run[0], -run[3], -run[0]))
            start, stop, place, number = best
            found = texts[number].document_at(place)
            spans.append(CopiedSpan(start, stop, texts[number].source, *found, row))
            pieces += [(begin, start, runs), (stop, end, runs)]
    return sorted(spans, key=lambda span: span.start)
