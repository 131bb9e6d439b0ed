"""Growing texts of tokens, each linked to the previous place of the same token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from ..kernels.kernel import kernel, kernel_type

# No vocabulary comes near it. It bounds the memory of `LinkedText.latest`.
LARGEST_ID = 2**24


class LinkedText(NamedTuple):
    """Tokens, each linked to the previous place of the same token.

    `latest[token]` is the last position of `token`, and `previous[position]` the next earlier one
    of the token at `position`; -1 for none. Visiting a token's occurrences, latest first, takes
    time proportional to their number, whatever the length of the text. A negative token is a
    boundary, and not linked."""

    tokens: np.ndarray  # int32, (n,)
    previous: np.ndarray  # int32, (n,)
    latest: np.ndarray  # int32, longer than the largest token


kernel_type("LinkedText", LinkedText, "int32[::1], int32[::1], int32[::1]")


class TokenBuffer:
    """A [`LinkedText`] that grows and shrinks, in amortised constant time per token."""

    def __init__(self) -> None:
        self._length = 0
        self._tokens = np.empty(1024, dtype=np.int32)
        self._previous = np.empty(1024, dtype=np.int32)
        self._latest = np.empty(0, dtype=np.int32)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> np.ndarray:
        """All tokens, int32 of shape `(n,)`, a view that `extend` makes stale."""
        return self._tokens[: self._length]

    @property
    def text(self) -> LinkedText:
        """The linked text, views that `extend` makes stale."""
        end = self._length
        return LinkedText(self._tokens[:end], self._previous[:end], self._latest)

    def snapshot(self) -> LinkedText:
        """The linked text as it is now, whatever the buffer does next but `truncate`."""
        # `extend` appends to the other arrays, and overwrites only this one.
        return self.text._replace(latest=self._latest.copy())

    def extend(self, tokens: np.ndarray) -> None:
        """Appends `tokens` (integers below 2**31, shape `(n,)`)."""
        if len(tokens) == 0:
            return
        start = self._length
        length = start + len(tokens)
        if length > len(self._tokens):
            capacity = max(length, 2 * len(self._tokens))
            self._tokens = _resized(self._tokens, capacity)
            self._previous = _resized(self._previous, capacity)
        self._tokens[start:length] = tokens
        vocabulary = int(tokens.max()) + 1
        if vocabulary > len(self._latest):
            self._latest = _resized(self._latest, max(vocabulary, 2 * len(self._latest)))
        self._length = length
        link_tokens(self._tokens[:length], start, self._previous, self._latest)

    def add_text(self, tokens: np.ndarray) -> None:
        """Appends `tokens` (n,) and a boundary."""
        self.extend(np.append(tokens, -1))

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens."""
        unlink_tokens(self.tokens, length, self._previous, self._latest)
        self._length = length


class JoinedTexts:
    """A [`LinkedText`] of several texts, each in a row that ends with a boundary.

    If a text outgrows its `room`, or there is no row for a new text, all texts move to an array of
    twice the room or rows: amortised constant time per token."""

    def __init__(self, room: int = 256) -> None:
        self._lengths: list[int] = []
        self._tokens = np.empty((0, room), dtype=np.int32)  # a row for each text, filled up with -1
        self._previous = self._latest = np.empty(0, dtype=np.int32)

    def __len__(self) -> int:
        """The number of texts."""
        return len(self._lengths)

    @property
    def text(self) -> LinkedText:
        """The linked text, views that `add` and `extend` make stale."""
        return LinkedText(self._tokens.reshape(-1), self._previous, self._latest)

    def add(self, tokens: np.ndarray) -> int:
        """Adds a text that begins with `tokens`, as `extend` takes them; returns its number."""
        self._lengths.append(0)
        if len(self) > len(self._tokens):
            self._lay_out(2 * len(self) - 1, self._tokens.shape[1])
        self.extend(len(self) - 1, tokens)
        return len(self) - 1

    def extend(self, number: int, tokens: np.ndarray) -> None:
        """Appends `tokens` (integers from 0 to 2**31 - 1, shape `(n,)`) to a text."""
        if len(tokens) == 0:
            return
        before = self._lengths[number]
        length = self._lengths[number] = before + len(tokens)
        if length >= self._tokens.shape[1]:  # one place is the boundary's
            self._lay_out(len(self._tokens), 2 * (length + 1))
        self._tokens[number, before:length] = tokens
        vocabulary = int(tokens.max()) + 1
        if vocabulary > len(self._latest):
            self._latest = _resized(self._latest, max(vocabulary, 2 * len(self._latest)))
        begin = number * self._tokens.shape[1]
        linked = self._tokens.reshape(-1)[: begin + length]
        link_tokens(linked, begin + before, self._previous, self._latest)

    def _lay_out(self, texts: int, room: int) -> None:
        """Gives a number of texts places with that room."""
        held = self._tokens
        self._tokens = np.full((texts, room), -1, dtype=np.int32)
        self._tokens[: len(held), : held.shape[1]] = held
        self._previous = np.full(self._tokens.size, -1, dtype=np.int32)
        self._latest = np.full_like(self._latest, -1)
        link_tokens(self._tokens.reshape(-1), 0, self._previous, self._latest)


def _resized(array: np.ndarray, length: int) -> np.ndarray:
    resized = np.full(length, -1, dtype=np.int32)
    resized[: len(array)] = array
    return resized


@kernel("void(int32[::1], int64, int32[::1], int32[::1])")
def link_tokens(tokens, start, previous, latest):
    """Links the tokens (n,) from `start` on."""
    for position in range(start, len(tokens)):
        token = tokens[position]
        if token < 0:
            previous[position] = -1
        else:
            previous[position] = latest[token]
            latest[token] = position


@kernel("void(int32[::1], int64, int32[::1], int32[::1])")
def unlink_tokens(tokens, length, previous, latest):
    """Removes the links of the tokens (n,) from `length` on, the last one first."""
    for position in range(len(tokens) - 1, length - 1, -1):
        if tokens[position] >= 0:
            latest[tokens[position]] = previous[position]


@njit
def latest_of(text, token):
    """The last position of `token` in a `LinkedText`, -1 if there is none."""
    return text.latest[token] if 0 <= token < len(text.latest) else -1


@njit
def common_suffix(tokens, position, context, skipped):
    """The number of equal `tokens` (n,) up to a position and of `context` (m,) up to `skipped`."""
    last = len(context) - 1 - skipped
    length = 0
    while length <= min(position, last) and tokens[position - length] == context[last - length]:
        length += 1
    return length
