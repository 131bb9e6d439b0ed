"""Documents whose number grows: sorted segments that never change, and a tail.

A log-structured text. New documents go into the tail, a `TokenBuffer`, at once. A long tail is
sealed: sorted into a segment. Neighbouring segments of about one size are joined, so that sizes
grow geometrically and their number stays small.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .suffix_array import IndexedText, build_suffix_array
from .token_buffer import LinkedText, TokenBuffer

# A segment is joined with the newer ones unless it is more than 4 times as large as all of them: a
# larger factor leaves fewer segments to search, and sorts each token more often.
GROWTH = 4
# Sorting more tokens takes minutes and 8 bytes of memory a token.
LARGEST_SEGMENT = 1 << 26


@dataclass(slots=True, eq=False)
class Documents:
    """Documents one behind the other, numbered from `first` on, each a prompt and its output.

    Attributes:
        first (`int`): The number of the first one.
        text: Their tokens, with a boundary behind each document.
        ends (`np.ndarray` or `array`): Where the boundary behind each document is.
        prompt_lengths (the same): How many of the first tokens of each are its prompt.
    """

    first: int
    text: IndexedText | LinkedText | TokenBuffer
    ends: np.ndarray | array[int]
    prompt_lengths: np.ndarray | array[int]

    @property
    def tokens(self) -> np.ndarray:
        return self.text.tokens

    @property
    def end(self) -> int:
        """The number of the document after the last one."""
        return self.first + len(self.ends)

    def place(self, number: int) -> tuple[int, int]:
        """Where a document begins and ends among the tokens."""
        index = number - self.first
        return int(self.ends[index - 1]) + 1 if index else 0, int(self.ends[index])

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The prompt and the output of a document."""
        begin, end = self.place(number)
        split = begin + int(self.prompt_lengths[number - self.first])
        return self.tokens[begin:split], self.tokens[split:end]


@dataclass(slots=True, eq=False)
class Segment(Documents):
    """Sorted documents, see [`Documents`]."""

    text: IndexedText
    ends: np.ndarray
    prompt_lengths: np.ndarray

    @classmethod
    def build(
        cls, first: int, tokens: np.ndarray, ends: np.ndarray, prompt_lengths: np.ndarray
    ) -> Segment:
        """Sorts documents; in `tokens` (int32) there is a -1 behind each."""
        largest = int(tokens.max())
        # In both types -1 becomes the largest number, the separator.
        packed = tokens.astype(np.uint16 if largest < 2**16 - 1 else np.uint32)
        text = IndexedText(packed, build_suffix_array(packed), largest + 1)
        return cls(first, text, ends, prompt_lengths)

    def since(self, number: int) -> Segment:
        """Its documents from this number on, at least one."""
        if number <= self.first:
            return self
        begin, _ = self.place(number)
        # The suffixes that are left keep their order: nothing needs to be sorted.
        suffixes = self.text.suffixes[self.text.suffixes >= begin] - np.int32(begin)
        text = self.text._replace(tokens=self.text.tokens[begin:].copy(), suffixes=suffixes)
        index = number - self.first
        return Segment(
            number, text, self.ends[index:] - np.int32(begin), self.prompt_lengths[index:].copy()
        )


def joined(segments: Sequence[Segment], oldest: int) -> Segment:
    """Joins consecutive segments, one or more, without the documents before `oldest`."""
    parts = [segment.since(oldest) for segment in segments if segment.end > oldest]
    if len(parts) == 1:
        return parts[0]
    sizes = np.cumsum([0] + [len(part.tokens) for part in parts], dtype=np.int32)
    ends = np.concatenate([part.ends + size for part, size in zip(parts, sizes, strict=False)])
    tokens = np.concatenate([part.tokens for part in parts])
    tokens[ends] = np.iinfo(tokens.dtype).max  # the separator of a type may have become a wider one
    text = IndexedText(
        tokens, build_suffix_array(tokens), max(part.text.vocab_size for part in parts)
    )
    prompt_lengths = np.concatenate([part.prompt_lengths for part in parts])
    return Segment(parts[0].first, text, ends, prompt_lengths)


def due_to_join(sizes: Sequence[int], largest: int = LARGEST_SEGMENT) -> slice | None:
    """Which consecutive segments should be joined into one of at most `largest` tokens, if any."""
    for newest in range(len(sizes), 1, -1):  # the last ones may already be too large to join
        oldest, total = newest - 1, sizes[newest - 1]
        while (
            oldest > 0
            and sizes[oldest - 1] <= GROWTH * total
            and sizes[oldest - 1] + total <= largest
        ):
            oldest -= 1
            total += sizes[oldest]
        if newest - oldest > 1:
            return slice(oldest, newest)
    return None


class Tail(Documents):
    """The newest documents, not sorted yet, see [`Documents`]."""

    text: TokenBuffer
    ends: array[int]
    prompt_lengths: array[int]

    def __init__(self, first: int = 0) -> None:
        super().__init__(first, TokenBuffer(), array("i"), array("i"))

    def extend(self, tokens: np.ndarray, ends: np.ndarray, prompt_lengths: np.ndarray) -> None:
        """Adds documents, as [`Segment.build`] takes them."""
        self.ends.extend((ends + len(self.text)).tolist())
        self.prompt_lengths.extend(prompt_lengths.tolist())
        self.text.extend(tokens)

    def since(self, number: int) -> Tail:
        """Its documents from this number on."""
        if number <= self.first:
            return self
        tail = Tail(number)
        if number < self.end:
            begin, _ = self.place(number)
            _, tokens, ends, prompt_lengths = self.arrays()
            kept = slice(number - self.first, None)
            tail.extend(tokens[begin:], ends[kept] - begin, prompt_lengths[kept])
        return tail

    def arrays(self) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """The arguments of [`Segment.build`]; growth of the tail does not change them."""
        ends, prompt_lengths = (np.array(each) for each in (self.ends, self.prompt_lengths))
        return self.first, self.tokens, ends, prompt_lengths

    def snapshot(self) -> Documents:
        """The documents as they are now; growth of the tail does not change them."""
        first, _, ends, prompt_lengths = self.arrays()
        return Documents(first, self.text.snapshot(), ends, prompt_lengths)
