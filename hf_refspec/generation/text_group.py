"""Texts of a running batch that share forward passes, or one that has its own."""

from __future__ import annotations

from collections.abc import Sequence

from ..drafting.drafter import Drafter
from ..drafting.stats import SpeculationStats
from ..verification.chain import PlainVerifier
from ..verification.draft_limits import DraftLimits
from ..verification.packed import PackedVerifier
from ..verification.tree import TreeVerifier
from ..verification.verifier import Verifier
from .budget import make_budget
from .loop import Loop
from .prefixes import CachedText
from .running_text import RunningText


class TextGroup:
    """Texts that have their first token, and the loop that decodes them."""

    def __init__(self, loop: Loop, texts: list[RunningText]) -> None:
        self.texts = texts
        self._loop = loop

    @classmethod
    def of(
        cls, text: RunningText, max_draft_tokens: int | str, stats: SpeculationStats
    ) -> TextGroup:
        """Begins with a text."""
        assert text._loop is not None
        if not text._joins:
            return cls(text._loop, [text])
        first, text._loop = text._loop.verifier, None
        assert isinstance(first, TreeVerifier)
        return cls(make_loop(PackedVerifier.of(first), max_draft_tokens, stats), [text])

    @property
    def _shared(self) -> PackedVerifier | None:
        """What runs the passes that texts share."""
        verifier = self._loop.verifier
        return verifier if isinstance(verifier, PackedVerifier) else None

    @property
    def is_over(self) -> bool:
        """Whether no text is left, and none may join."""
        return not self.texts and self._shared is None

    def takes(self, text: RunningText) -> bool:
        """Whether a text may join."""
        return text._joins and self._shared is not None

    def join(self, text: RunningText) -> None:
        """Adds a text that it takes."""
        shared, loop, text._loop = self._shared, text._loop, None
        assert shared is not None and loop is not None
        assert isinstance(loop.verifier, TreeVerifier)
        shared.join(loop.verifier)
        self.texts.append(text)

    def step(self) -> None:
        """A step of all texts."""
        if not self.texts:
            return
        rows = [text._row for text in self.texts]
        self._loop.prepare(rows)
        self._loop.step(rows)
        if self._shared is not None:
            for text, row in zip(self.texts, rows, strict=True):
                text.stats.record_rows([(len(row.verified), len(row.path or ()))])

    def leave(self, texts: Sequence[RunningText]) -> None:
        """Takes texts out."""
        kept = [i for i, text in enumerate(self.texts) if text not in texts]
        if len(kept) == len(self.texts):
            return
        self.texts = [self.texts[i] for i in kept]
        if self._shared is not None:
            self._shared.select(kept)

    def cached(self) -> list[tuple[RunningText, CachedText]]:
        """The texts that others may share something with, as far as they are cached, until the next
        text leaves or step runs."""
        if self._shared is None:
            return []
        found = []
        for i, text in enumerate(self.texts):
            if text._in_pieces:
                entries = self._shared.cached_entries(i)
                length = entries[0][0].shape[2]
                found.append((text, CachedText(text._ids[:length], entries, text._state)))
        return found


def make_loop(verifier: Verifier, max_draft_tokens: int | str, stats: SpeculationStats) -> Loop:
    """A loop over texts whose drafters each decide for themselves."""
    most = 0 if isinstance(verifier, PlainVerifier) else max_draft_tokens
    model, kind = verifier.model, (verifier.kind_of_pass, verifier.widths, verifier.packs)
    budget = make_budget(most, Drafter(), model, *kind)
    limits = DraftLimits(
        type(verifier), model, verifier.fewest_rows, verifier.model_kwargs, stats=stats
    )
    return Loop(verifier, budget, limits, stats, chains=not verifier.takes_trees)
