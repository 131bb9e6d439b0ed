"""Texts that grow side by side in one linked text."""

from __future__ import annotations

import numpy as np

from .token_buffer import LinkedText, link_tokens

_ROOM = 256  # tokens of a text at first


class SideBySide:
    """A [`LinkedText`] of several texts, each in a place of its own with a boundary behind it: what
    one of them gets is found from all others at once.

    Where a text outgrows its place, or a text is added, all are laid out anew with twice the room:
    amortised constant time per token.
    """

    def __init__(self) -> None:
        self._room = _ROOM
        self._lengths: list[int] = []
        self._tokens = self._previous = self._latest = np.empty(0, dtype=np.int32)

    def __len__(self) -> int:
        """How many texts there are."""
        return len(self._lengths)

    @property
    def text(self) -> LinkedText:
        """The linked text, views that `add` and `extend` make stale."""
        return LinkedText(self._tokens, self._previous, self._latest)

    def add(self, tokens: np.ndarray) -> int:
        """Adds a text that begins with `tokens`, as `extend` takes them; returns its number."""
        self._lengths.append(0)
        if len(self) * self._room > len(self._tokens):
            self._lay_out(2 * len(self) - 1)
        self.extend(len(self) - 1, tokens)
        return len(self) - 1

    def extend(self, number: int, tokens: np.ndarray) -> None:
        """Appends `tokens` (integers from 0 to 2**31 - 1, shape `(n,)`) to a text."""
        if len(tokens) == 0:
            return
        length = self._lengths[number] + len(tokens)
        if length >= self._room:  # one place is the boundary's
            texts = len(self._tokens) // self._room
            before, self._room = self._room, 2 * (length + 1)
            self._lay_out(texts, before)
        begin = number * self._room
        start, end = begin + self._lengths[number], begin + length
        self._tokens[start:end] = tokens
        missing = int(tokens.max()) + 1 - len(self._latest)
        if missing > 0:
            more = np.full(missing + len(self._latest), -1, dtype=np.int32)
            self._latest = np.concatenate((self._latest, more))
        self._lengths[number] = length
        link_tokens(self._tokens[:end], start, self._previous, self._latest)

    def _lay_out(self, texts: int, room: int | None = None) -> None:
        """Gives places to so many texts, which had `room` each before."""
        held = self._tokens.reshape(-1, room or self._room)
        tokens = np.full((texts, self._room), -1, dtype=np.int32)
        tokens[: len(held), : held.shape[1]] = held
        self._tokens = tokens.ravel()
        self._previous = np.full_like(self._tokens, -1)
        self._latest = np.full_like(self._latest, -1)
        link_tokens(self._tokens, 0, self._previous, self._latest)
