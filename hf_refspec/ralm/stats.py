"""Counts and times of a call that retrieves."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ..drafting.stats import Figures, shares
from ..messages import counted


@dataclass(repr=False)
class RalmStats(Figures):
    """Counts and times of one call that retrieves while it generates.

    Attributes:
        searches (`int`): Searches of the retriever, each for one or more queries.
        retrievals (`int`): Queries of these searches.
        speculated (`int`): Steps that were generated with a guess of a search's result.
        verified (`int`): Speculated steps that were right.
        mismatched (`int`): Speculated steps that were wrong and repeated with the truth.
        discarded (`int`): Speculated steps undone because an earlier one was wrong, or because the
            retriever failed.
        strides (`list[int]`): The number of steps of each verification.
        best_ids (`list[int]`): The retriever's best passage for each step of the text.
        speculation_was_right (`list[bool]`): For each step of the text, `True` if it was speculated
            and right.
        model_seconds (`float`): Generating.
        query_seconds (`float`): Encoding queries.
        cache_seconds (`float`): Guessing the result of searches, and filling the request cache.
        search_seconds (`float`): Searching, also while the model was generating.
        waiting_seconds (`float`): Waiting for a search.
        contention (`float`): The factor by which a step takes longer while a search runs, measured
            or expected by the number of threads. From 2 on, no step is generated meanwhile.
    """

    searches: int = 0
    retrievals: int = 0
    speculated: int = 0
    verified: int = 0
    mismatched: int = 0
    discarded: int = 0
    strides: list[int] = field(default_factory=list)
    best_ids: list[int] = field(default_factory=list)
    speculation_was_right: list[bool] = field(default_factory=list)
    model_seconds: float = 0.0
    query_seconds: float = 0.0
    cache_seconds: float = 0.0
    search_seconds: float = 0.0
    waiting_seconds: float = 0.0
    contention: float = 1.0

    @property
    def steps(self) -> int:
        """The steps of the text, each generated with the result of one query."""
        return len(self.best_ids)

    @property
    def gamma(self) -> float:
        """The fraction of right steps among those that were verified (RaLMSpec, section 4.2)."""
        return self.verified / max(self.verified + self.mismatched, 1)

    def clear(self) -> None:
        """Sets all figures back, for another call."""
        vars(self).update(vars(RalmStats()))

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain types that JSON can hold."""
        return {**dataclasses.asdict(self), "steps": self.steps, "gamma": self.gamma}

    def __repr__(self) -> str:
        """All figures in a line; `to_dict()` has them as numbers."""
        queries = counted(self.retrievals, "query", "queries")
        searches = counted(self.searches, "search", "searches")
        line = f"{counted(self.steps, 'step')}, {queries} in {searches}"
        if self.strides:
            line += (
                f" (mean stride {sum(self.strides) / len(self.strides):.1f}), "
                f"{self.speculated} speculated, {self.verified} right ({100 * self.gamma:.1f} %), "
                f"{self.mismatched} wrong, {self.discarded} discarded"
            )
        seconds = {
            "model": self.model_seconds,
            "waiting": self.waiting_seconds,
            "queries": self.query_seconds,
            "cache": self.cache_seconds,
        }
        searching = f"{self.search_seconds:.1f} s in searches"
        return f"{line}, {shares(seconds)}; {searching}, contention {self.contention:.2f}"
