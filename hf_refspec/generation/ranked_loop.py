"""The loop of a model that several processes run together, see `ranks.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..drafting.top_tokens import TopTokens
from ..verification.ranks import Ranks
from .loop import Loop
from .row import Row
from .step import Step


@dataclass
class RankedLoop(Loop):
    """Decodes the same text in all `ranks`: the drafts and the tokens of the first one count."""

    ranks: Ranks = field(default_factory=Ranks)

    def __post_init__(self) -> None:
        """Passes are not padded: each rank has measured other costs."""

    def _prompt_fraction(self, rows: Sequence[Row]) -> float:
        return self.ranks.agree(super()._prompt_fraction(rows))  # the output layer may be split

    def _draft(self, steps: Sequence[Step]) -> None:
        if self.ranks.is_first:
            super()._draft(steps)

    def _choose_nodes(self, steps: Sequence[Step], drafting_seconds: float) -> None:
        super()._choose_nodes(steps, drafting_seconds)
        chosen = self.ranks.agree([step.verified for step in steps])
        for step, verified in zip(steps, chosen, strict=True):
            step.verified = verified

    def _accept(self, steps: Sequence[Step], logits: torch.Tensor) -> TopTokens | None:
        top = super()._accept(steps, logits)
        own = [(step.path, step.emitted.tolist(), step.row.stopped_at) for step in steps]
        for step, mine, first in zip(steps, own, self.ranks.agree(own), strict=True):
            if mine != first:
                step.path, tokens, stopped_at = first
                step.row.replace(len(mine[1]), tokens, stopped_at)
        return top
