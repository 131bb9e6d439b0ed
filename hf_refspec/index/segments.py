"""Documents whose number grows: sorted segments that never change, and a tail.

A log-structured text. New documents go into the tail, a `TokenBuffer`, at once. When that has grown
long it is sealed: sorted into a segment. Segments that stand beside each other are joined when they
are of about one size, so that their sizes grow geometrically and their number stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .suffix_array import IndexedText, build_suffix_array
from .token_buffer import LinkedText, TokenBuffer

# A segment is joined with the newer ones unless it is more than so many times as large as all of
# them: a larger factor leaves fewer segments to search and sorts each token more often.
GROWTH = 4
# More tokens are not joined: to sort them takes minutes and 8 bytes of memory a token.
LARGEST_SEGMENT = 1 << 26
_BOUNDARY = np.array([-1])


class Documents:
    """Documents one behind the other, numbered from `first` on, each a prompt and its output.

    Attributes:
        first (`int`): The number of the first one.
        tokens (`np.ndarray`, integers of shape `(n,)`): The documents, a boundary behind each.
        ends (sequence of `int`): Where the boundary behind each document is.
        prompt_lengths (sequence of `int`): How many of the first tokens of each are its prompt.
    """

    __slots__ = ()
    first: int
    ends: Sequence[int] | np.ndarray
    prompt_lengths: Sequence[int] | np.ndarray

    @property
    def tokens(self) -> np.ndarray:
        raise NotImplementedError

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


@dataclass(frozen=True, slots=True, eq=False)
class Segment(Documents):
    """Documents that are sorted, see [`Documents`].

    Attributes:
        text (`IndexedText`): The documents.
        ends, prompt_lengths (`np.ndarray`, int32 of shape `(d,)`): See [`Documents`].
        name (`str`): Of the file that it is stored in, if it is.
    """

    first: int
    text: IndexedText
    ends: np.ndarray
    prompt_lengths: np.ndarray
    name: str = ""

    @classmethod
    def build(
        cls, first: int, tokens: np.ndarray, ends: np.ndarray, prompt_lengths: np.ndarray
    ) -> Segment:
        """Sorts documents.

        Args:
            first (`int`): The number of the first one.
            tokens (`np.ndarray`, int32 of shape `(n,)`): The documents, -1 behind each.
            ends, prompt_lengths (`np.ndarray`): As the attributes.
        """
        largest = int(tokens.max())
        # In both types -1 becomes the largest number, the separator.
        packed = tokens.astype(np.uint16 if largest < 2**16 - 1 else np.uint32)
        text = IndexedText(packed, build_suffix_array(packed), largest + 1)
        return cls(first, text, ends, prompt_lengths)

    @property
    def tokens(self) -> np.ndarray:
        return self.text.tokens

    def check(self) -> None:
        """Checks arrays from a file that nobody has checked: all but the order of the suffixes.

        Raises:
            ValueError: If they do not fit together.
        """
        tokens, suffixes = self.text.tokens, self.text.suffixes
        lengths = np.diff(self.ends.astype(np.int64), prepend=-1) - 1
        if len(lengths) == 0 or lengths.min() < 1 or self.ends[-1] != len(tokens) - 1:
            raise ValueError("its ends are not those of its documents")
        if np.any(self.prompt_lengths < 0) or np.any(self.prompt_lengths > lengths):
            raise ValueError("its prompts do not fit into its documents")
        outside = np.flatnonzero(tokens >= self.text.vocab_size)
        if not np.array_equal(outside, self.ends) or np.any(tokens[outside] != self.text.separator):
            raise ValueError(
                "its tokens are not all in its vocabulary, with separators at its ends"
            )
        found = np.zeros(len(tokens), dtype=bool)
        if len(suffixes) == len(tokens) and suffixes.min() >= 0 and suffixes.max() < len(tokens):
            found[suffixes] = True
        if not found.all():
            raise ValueError("its suffixes are not those of its tokens")

    def since(self, number: int) -> Segment:
        """Those of its documents that have this number or a greater one, at least one."""
        if number <= self.first:
            return self
        begin, _ = self.place(number)
        # The suffixes that are left keep their order: nothing needs to be sorted.
        suffixes = self.text.suffixes[self.text.suffixes >= begin] - np.int32(begin)
        text = replace(self.text, tokens=self.text.tokens[begin:].copy(), suffixes=suffixes)
        index = number - self.first
        return Segment(
            number, text, self.ends[index:] - np.int32(begin), self.prompt_lengths[index:].copy()
        )


def joined(segments: Sequence[Segment], oldest: int) -> Segment:
    """Joins segments that follow each other into one, without the documents before `oldest`.

    Args:
        segments (sequence of [`Segment`]): At least one.
        oldest (`int`): A number below the end of the last one.
    """
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


def due_to_join(sizes: Sequence[int]) -> slice | None:
    """Which segments should be made one.

    Args:
        sizes (sequence of `int`): Their tokens, the oldest segment first.

    Returns:
        `slice` or `None`: Two or more that follow each other; `None` if all is well.
    """
    for newest in range(len(sizes), 1, -1):  # the last ones may already be too large to join
        oldest, total = newest - 1, sizes[newest - 1]
        while (
            oldest > 0
            and sizes[oldest - 1] <= GROWTH * total
            and sizes[oldest - 1] + total <= LARGEST_SEGMENT
        ):
            oldest -= 1
            total += sizes[oldest]
        if newest - oldest > 1:
            return slice(oldest, newest)
    return None


class Tail(Documents):
    """The newest documents, not sorted yet, see [`Documents`].

    Args:
        first (`int`): The number of the first document that will be added.
    """

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.ends: list[int] = []
        self.prompt_lengths: list[int] = []
        self._text = TokenBuffer()

    @property
    def tokens(self) -> np.ndarray:
        return self._text.tokens

    def add(self, prompt: np.ndarray, output: np.ndarray) -> None:
        """Adds a document: integer arrays of shape `(n,)`, not both empty."""
        self._text.extend(prompt)
        self._text.extend(output)
        self.ends.append(len(self._text))
        self.prompt_lengths.append(len(prompt))
        self._text.extend(_BOUNDARY)

    def since(self, number: int) -> Tail:
        """Those of its documents that have this number or a greater one."""
        if number <= self.first:
            return self
        tail = Tail(number)
        if number < self.end:
            begin, _ = self.place(number)
            tail._text.extend(self.tokens[begin:])
            tail.ends = [end - begin for end in self.ends[number - self.first :]]
            tail.prompt_lengths = self.prompt_lengths[number - self.first :]
        return tail

    def arrays(self) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """What [`Segment.build`] takes; it stays as it is while the tail grows."""
        ends, prompt_lengths = np.array([self.ends, self.prompt_lengths], dtype=np.int32)
        return self.first, self.tokens, ends, prompt_lengths

    def linked(self) -> LinkedText:
        """The text as it is now."""
        return self._text.snapshot()
