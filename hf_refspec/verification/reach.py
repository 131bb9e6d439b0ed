"""How far the drafts of a call may reach."""

from __future__ import annotations

import sys
from typing import Any

from transformers import PreTrainedModel

from ..text_config import text_config
from .positions import PositionLimits, boundaries
from .probe import probe
from .verifier import Verifier


class Reach:
    """The positions that a draft may have, see [`PositionLimits`], and the lengths that are probed.

    Drafts first end before the next length at which attention may become another computation. Once
    a text is there, a probe whose text crosses it decides whether drafts go on.

    Args:
        kind (`type`): Of the call's verifier.
        model (`PreTrainedModel`): The target model.
        rows (`int`): How many.
        model_kwargs (`dict`): Keyword arguments of the forward pass.
    """

    def __init__(
        self,
        kind: type[Verifier],
        model: PreTrainedModel,
        rows: int,
        model_kwargs: dict[str, Any],
    ) -> None:
        config = text_config(model)
        self._probed = (kind, model, rows, model_kwargs)
        self._positions = PositionLimits.of(config)
        self._boundaries = boundaries(config)
        self._refused = False  # at the next of them

    def cross(self, length: int) -> None:
        """Probes the lengths that a text of this one has come to, once each."""
        while not self._refused and self._boundaries and length >= self._boundaries[0]:
            if probe(*self._probed, boundary=self._boundaries[0]).exact:
                self._boundaries = self._boundaries[1:]
            else:
                self._refused = True

    def depth(self, length: int, last_position: int) -> int:
        """How deep a draft may go behind so many tokens, the last of them at this position; 0 or
        less where there is to be none. No draft passes a length that was not probed."""
        deepest = sys.maxsize
        # Some models count positions, others tokens with their padding (Phi-3 drops its cache so).
        for last in (last_position, length - 1):
            if (furthest := self._positions.furthest(last)) is not None:
                deepest = min(deepest, furthest - last)
        return min(deepest, self._boundaries[0] - length) if self._boundaries else deepest
