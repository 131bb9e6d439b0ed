"""Counts and times of a speculative call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING, Any

from ..messages import counted
from ..notebooks import colored_by, html_table, spans

if TYPE_CHECKING:
    from .copied_spans import CopiedSpan


def shares(seconds: dict[str, float]) -> str:
    """A sum of times, and the percentage of each: `2.0 s: 75 % verifying, 25 % drafting`."""
    total = sum(seconds.values())
    parts = [f"{100 * part / total:.0f} % {name}" for name, part in seconds.items() if part]
    return f"{total:.1f} s" + (": " + ", ".join(parts) if parts else "")


class Figures:
    """Counts, times and lists that a call adds to."""

    def add(self, **figures: Any) -> None:
        """Adds to the figures of these names: `drafting_seconds=0.1`."""
        for name, added in figures.items():
            setattr(self, name, getattr(self, name) + added)


@dataclass(repr=False)
class SourceStats(Figures):
    """Counts of one source of a [`Blend`], or of a drafter alone.

    Attributes:
        name (`str`): The name of its class.
        drafted (`int`): Nodes that it drafted, before merging.
        accepted (`int`): Nodes among them that were accepted.
        first (`int`): Accepted nodes that no earlier source of the blend had drafted.
    """

    name: str
    drafted: int = 0
    accepted: int = 0
    first: int = 0

    @property
    def counts(self) -> str:
        return f"{self.drafted} drafted before merging, {self.accepted} accepted"

    def __repr__(self) -> str:
        return f"{self.name}: {self.counts}"

    def __add__(self, other: SourceStats) -> SourceStats:
        """The counts of two calls of the same blend."""
        both = SourceStats(self.name)
        for one in (self, other):
            both.add(drafted=one.drafted, accepted=one.accepted, first=one.first)
        return both


@dataclass(repr=False)
class DraftStats(Figures):
    """Counts and times of one call of `generate`, over all of its rows.

    Attributes:
        forward_passes (`int`): Forward passes of the target model, including the prefill, which
            yields the first new token.
        probe_passes (`int`): Further forward passes, which probed how the model can verify drafts;
            0 if it has not changed since an earlier call.
        tokens (`int`): New tokens.
        drafts (`int`): Drafts that were verified, at most one for each row of a pass; LLMA's paper
            calls them triggers.
        drafted (`int`): Draft tokens that were verified.
        accepted (`int`): Draft tokens that were accepted.
        accepted_lengths (`list[int]`): `accepted_lengths[i]` passes accepted `i` draft tokens; a
            pass over several rows counts once for each row.
        prefill_seconds (`float`): The first forward pass, over the prompt.
        drafting_seconds (`float`): Drafting.
        verifying_seconds (`float`): Forward passes of the target model after the prefill, and the
            choice of the next tokens, with logits processors, stopping criteria and the streamer.
        learning_seconds (`float`): The drafters and the budget learn from each pass.
        other_seconds (`float`): Keeping the accepted tokens in the cache.
        sources (`list[SourceStats]`): One for each source of a blend; a drafter alone is its only
            source.
        verification (`str`): The kind of verification: `"tree"`, `"chain"`, `"static"` or
            `"reproducible"`; `"none"` where the call decoded plainly.
        reason (`str`, *optional*): Why nothing was drafted, or why drafts ended early.
    """

    forward_passes: int = 0
    probe_passes: int = 0
    tokens: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    drafting_seconds: float = 0.0
    verifying_seconds: float = 0.0
    learning_seconds: float = 0.0
    other_seconds: float = 0.0
    sources: list[SourceStats] = field(default_factory=list)
    verification: str = "none"
    reason: str | None = None

    def __post_init__(self) -> None:
        # In a call with one row: the first source that drafted each new token, if any.
        self.owners: list[int | None] = []
        # The new tokens of a call with one row, and the tokenizer that the call was given.
        self.text: tuple[Sequence[int], Any] = (), None
        self._copied: list[CopiedSpan] = []
        # Each row, its new tokens, and the sources' texts, until `copied` searches them.
        self.outputs: list[tuple[int, Sequence[int], list[Any]]] = []

    def __getstate__(self) -> dict[str, Any]:
        no_text = {"text": ((), None), "outputs": []}  # goes along
        return {**vars(self), "_copied": self.copied, **no_text}

    @property
    def copied(self) -> list[CopiedSpan]:
        """The new tokens, at least 5 together, that occur in what the drafter copies from, drafted
        or not. Searched when first read: until then statistics keep these texts in memory."""
        from .copied_spans import copied_spans  # loaded only where it is asked for

        while self.outputs:
            self._copied += copied_spans(*self.outputs.pop(0))
        return self._copied

    @property
    def mat(self) -> float:
        """MAT, the mean accepted tokens: new tokens per forward pass and row; 1.0 if plain."""
        passes = sum(self.accepted_lengths)
        return self.tokens / passes if passes else 0.0

    @property
    def seconds(self) -> float:
        """The time of the whole call."""
        return sum(self._seconds_by_part().values())

    def _seconds_by_part(self) -> dict[str, float]:
        parts = ("prefill", "verifying", "drafting", "learning", "other")
        return {part: getattr(self, f"{part}_seconds") for part in parts}

    def record_rows(self, rows: Iterable[tuple[int, int]]) -> None:
        """Counts one forward pass over several rows, each with the numbers of its draft tokens and
        of the accepted ones; the pass yields one token more."""
        self.forward_passes += 1
        for drafted, accepted in rows:
            self.tokens += accepted + 1
            self.drafts += drafted > 0
            self.drafted += drafted
            self.accepted += accepted
            self.accepted_lengths += [0] * (accepted + 1 - len(self.accepted_lengths))
            self.accepted_lengths[accepted] += 1
            if len(self.owners) < self.tokens:  # of a drafter alone: a blend has added its own
                self.owners += [*[0] * accepted, None]

    def explain(self, verification: str, reason: str | None = None) -> None:
        """Says how drafts were verified, and why nothing was drafted."""
        self.verification = verification
        self.reason = reason

    def __iadd__(self, other: DraftStats) -> DraftStats:
        """Adds another call's counts and times."""
        self.add(
            **{k: value for k, value in vars(other).items() if isinstance(value, (int, float))}
        )
        lengths = zip_longest(self.accepted_lengths, other.accepted_lengths, fillvalue=0)
        self.accepted_lengths = [sum(pair) for pair in lengths]
        self.add_sources(other.sources)
        return self

    def add_sources(self, others: Sequence[SourceStats]) -> None:
        """Adds the counts of the same sources in another row or call."""
        sources = zip_longest(self.sources, others)
        self.sources = [
            ours + theirs if ours and theirs else ours or theirs for ours, theirs in sources
        ]

    def to_dict(self) -> dict[str, Any]:
        """All figures, MAT included, as plain types that JSON can hold."""
        return {**dataclasses.asdict(self), "mat": self.mat}

    def __repr__(self) -> str:
        return f"DraftStats({self})"

    def _repr_html_(self) -> str:
        rows = [
            ("new tokens", self.tokens),
            ("forward passes", self.forward_passes),
            ("MAT", f"{self.mat:.2f}"),
            ("drafted, accepted", f"{self.drafted}, {self.accepted}"),
            ("time", shares(self._seconds_by_part())),
            ("verification", self.reason or self.verification),
        ]
        table = html_table(rows, ((source.name, source.counts) for source in self.sources))
        text = spans(self._pieces())
        return table + (f'<pre style="white-space:pre-wrap">{text}</pre>' if text else "")

    def _pieces(self) -> Iterator[tuple[str, str]]:
        """The text of a call that was given a tokenizer, each piece with its source's colour."""
        tokens, tokenizer = self.text
        if tokenizer is None or len(tokens) != len(self.owners):
            return
        count = 0
        shown = ""
        for owner, group in groupby(self.owners):
            count += len([*group])
            text = tokenizer.decode(tokens[:count], skip_special_tokens=True).rstrip("\ufffd")
            yield text[len(shown) :], colored_by(owner)
            shown = text

    def __str__(self) -> str:
        has_rows = sum(self.accepted_lengths) > self.forward_passes
        line = (
            f"{counted(self.tokens, 'token')} in {counted(self.forward_passes, 'pass', 'passes')}"
            f"{' over several rows' * has_rows}, MAT {self.mat:.2f}{' per row' * has_rows}, "
            f"{self.drafted} drafted"
        )
        if len(self.sources) > 1:
            line += f" (of {sum(source.drafted for source in self.sources)} before merging)"
        line += f", {self.accepted} accepted"
        if self.drafted:
            line += f" ({100 * self.accepted / self.drafted:.1f} %)"
        line += f", {shares(self._seconds_by_part())}"
        if self.probe_passes:
            line += f"; {counted(self.probe_passes, 'pass', 'passes')} probed the model"
        if self.reason:
            line += f"; {'drafts ended' if self.drafted else 'nothing drafted'}: {self.reason}"
        return line
