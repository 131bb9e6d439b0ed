"""How a cache keeps the accepted tokens of a pass and drops the others.

[`MovedEntries`] moves entries to where they belong and crops the rest, [`CroppedEntries`] crops the
end, [`RunningState`] restores the state from before the pass. For static caches see
`slotted_entries.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..drafting.tree import DraftTree
from .cache import crop_layers, keeps_every_position, move_entries, restore, snapshot
from .token_sequence import TokenSequence


@dataclass(frozen=True, slots=True)
class Pass:
    """What one forward pass runs of each row: its pending tokens, then the nodes of its draft.

    Attributes:
        rows (sequence of [`TokenSequence`]): R rows.
        drafts (sequence of [`DraftTree`]): One for each.
        cached (`list[int]`): How many tokens of each row the cache held before.
        pending (`list[int]`): How many tokens of each row come before its draft.
        size (`int`): The most tokens that a row has in the pass, S.
    """

    rows: Sequence[TokenSequence]
    drafts: Sequence[DraftTree]
    cached: list[int]
    pending: list[int]
    size: int

    @classmethod
    def over(
        cls, rows: Sequence[TokenSequence], drafts: Sequence[DraftTree], cached: list[int]
    ) -> Pass:
        """The next pass over rows of which the cache holds `cached` tokens each."""
        pending = [len(row) - n for row, n in zip(rows, cached, strict=True)]
        size = max(p + len(draft) for p, draft in zip(pending, drafts, strict=True))
        return cls(rows, drafts, cached, pending, size)

    def kept(self, paths: Sequence[list[int] | None]) -> list[list[int]]:
        """The tokens of each row that are accepted, as indices in the pass."""
        return [
            [] if path is None else [*range(p), *(p + node for node in path)]
            for p, path in zip(self.pending, paths, strict=True)
        ]

    def cached_after(self, paths: Sequence[list[int] | None]) -> list[int]:
        """How many tokens of each row the cache holds when those of these paths are kept."""
        return [
            cached if path is None else cached + pending + len(path)
            for cached, pending, path in zip(self.cached, self.pending, paths, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class EntriesMark:
    """What a cache held: its width where it can be cropped, else the states of its layers."""

    width: int | None = None
    layers: list[dict[str, Any]] | None = None


class Entries:
    """A cache that is only added to: no draft was ever run over it.

    Attributes:
        given (`int`): Entries before the prompt: a given cache may hold more than the ids.
    """

    # Whether accepted tokens run again in the next pass.
    reruns = False

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.given = 0

    def begin(self, prompt_length: int) -> None:
        """Prepares for drafts, after the prefill of prompts of this length."""

    def before(self, now: Pass) -> None:
        """Prepares for a pass."""

    def keep(self, done: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        """Keeps each row's pending tokens and the nodes of its path, see [`Verifier.keep`].

        Returns:
            `list[int]`: How many tokens of each row the cache holds now.
        """
        return done.cached_after(paths)

    def undo(self, done: Pass) -> list[int]:
        """Removes a pass that raised from the layers that it had reached; returns as `keep`."""
        return done.cached

    def select(self, rows: list[int], cached: list[int]) -> None:
        """Drops all rows but these; `cached` are theirs."""
        raise NotImplementedError

    def close(self, cached: list[int]) -> None:
        """Ends the call: crops the cache to these tokens of each row and restores its layers."""

    def mark(self) -> EntriesMark:
        """A snapshot for [`~Entries.roll_back`]."""
        if self.cache is None:
            return EntriesMark()
        if keeps_every_position(self.cache):
            return EntriesMark(width=self.cache.get_seq_length())
        return EntriesMark(layers=snapshot(self.cache))

    def roll_back(self, mark: EntriesMark) -> None:
        """Goes back to a mark, any number of times."""
        if mark.layers is not None:
            restore(self.cache, mark.layers)
        elif mark.width is not None:
            crop_to(self.cache, mark.width)


class CroppedEntries(Entries):
    """Entries of one row in order: the rejected ones are cropped from the end."""

    def begin(self, prompt_length: int) -> None:
        # Not before: a sliding window that records through the prefill would keep all of it.
        self.cache.activate_past_recording()

    def before(self, now: Pass) -> None:
        self._width = self.cache.get_seq_length()

    def keep(self, done: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        [path], [draft] = paths, done.drafts
        if path is not None:
            # Also with nothing to drop: it shrinks a recording sliding window back to its size.
            self.cache.crop(len(path) - len(draft))
        return done.cached_after(paths)

    def undo(self, done: Pass) -> list[int]:
        crop_layers(self.cache, self._width)
        return done.cached

    def close(self, cached: list[int]) -> None:
        for layer in self.cache.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False


class RunningState(Entries):
    """A state that cannot be cropped (Mamba 2, linear attention). The one from before the draft is
    restored, and the accepted tokens run again together with the next draft, so that a rejection
    costs no pass of its own."""

    reruns = True

    def before(self, now: Pass) -> None:
        self._before = snapshot(self.cache) if len(now.drafts[0]) else None

    def keep(self, done: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        [path], [draft] = paths, done.drafts
        if path is not None and len(path) == len(draft):
            return done.cached_after(paths)
        return self.undo(done)

    def undo(self, done: Pass) -> list[int]:
        if self._before is not None:
            restore(self.cache, self._before)
        return done.cached


class MovedEntries(Entries):
    """Entries of any number of rows, one for each position: the accepted ones move down to the end
    of their row, and what lies past the longest row is cropped. Rows that are shorter end in holes,
    which no query sees."""

    def begin(self, prompt_length: int) -> None:
        self.given = int(self.cache.get_seq_length()) - prompt_length

    def keep(self, done: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        cached = done.cached_after(paths)
        if done.size == 1 and None not in paths and min(done.cached) == max(done.cached):
            return cached  # all tokens stand where they belong
        ends = np.array(done.cached) + self.given
        start = self.cache.get_seq_length() - done.size
        kept = done.kept(paths)
        longest = max(kept, key=len)
        in_place = (ends == start).all() and all(nodes == longest[: len(nodes)] for nodes in kept)
        if not (in_place and longest == list(range(len(longest)))):
            sources = np.full((len(paths), len(longest)), start)
            for row, nodes in enumerate(kept):
                sources[row, : len(nodes)] += np.array(nodes, dtype=np.int64)
            # A row that keeps fewer moves something into its holes, which changes nothing.
            move_entries(self.cache, sources, ends[:, None] + np.arange(len(longest)))
        crop_to(self.cache, max(cached) + self.given)
        return cached

    def undo(self, done: Pass) -> list[int]:
        crop_layers(self.cache, max(done.cached) + self.given)
        return done.cached

    def select(self, rows: list[int], cached: list[int]) -> None:
        self.cache.batch_select_indices(torch.tensor(rows))
        crop_to(self.cache, max(cached) + self.given)

    def close(self, cached: list[int]) -> None:
        # Where no row ended with a token of its own, all may hold one past the returned ids.
        if cached:
            crop_to(self.cache, max(cached) + self.given)


def crop_to(cache: Any, width: int) -> None:
    """Crops a cache to this width, if it is wider."""
    if (excess := cache.get_seq_length() - width) > 0:
        cache.crop(-excess)
