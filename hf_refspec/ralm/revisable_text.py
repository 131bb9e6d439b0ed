"""A text that can go back to where it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..generation.row import TargetText


@dataclass(frozen=True, slots=True)
class TextMark:
    """Where a text was: its length, what was recorded of it, and the random numbers' state."""

    length: int
    finished: bool
    scores: tuple[torch.Tensor, ...] | None
    logits: tuple[torch.Tensor, ...] | None
    random_state: torch.Tensor | None


class RevisableText(TargetText):
    """The text of one call, of which the last tokens may turn out to be wrong.

    What was sampled is sampled again with the same random numbers. Logits processors and stopping
    criteria are asked again about tokens in place of others; they must go by the ids alone. It
    streams nothing.
    """

    def mark(self) -> TextMark:
        """The present."""
        return TextMark(len(self), self.finished, self.scores, self.logits, self._random_state())

    def roll_back(self, mark: TextMark) -> None:
        """Goes back to a mark."""
        self._ids = self.ids[:, : mark.length]
        self.finished = mark.finished
        self.scores, self.logits = mark.scores, mark.logits
        if mark.random_state is not None:
            self._random_numbers().set_rng_state(mark.random_state)

    def _random_state(self) -> torch.Tensor | None:
        return self._random_numbers().get_rng_state() if self._do_sample else None

    def _random_numbers(self) -> Any:
        """Where `choose` draws from: the default generator of the ids' device."""
        device = self._ids.device
        return torch.random if device.type == "cpu" else torch.get_device_module(device)
