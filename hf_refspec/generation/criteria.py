"""Stopping criteria and the streamer of a batch.

Plain decoding asks them after every token about all rows at once, which are equally long then. Rows
with drafts are not. Those of transformers look at each row by itself, and a row asks them of itself
as soon as it has a token. Any other may count its calls, or speak of all rows together (lm-eval's
stops when each row has had its stop string): it is asked about all rows at once, one length after
another, when all have come so far, and what a row had beyond a stop is dropped. A streamer gets the
tokens of all rows at once too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import StoppingCriteriaList

from ..verification.ranks import Ranks
from .row import Row, longest_row, padded

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


@dataclass
class BatchCriteria:
    """Stopping criteria that are asked about all rows of a call at once, once for each length, and
    the streamer that gets a token of each row, the padding too.

    A row that has ended is padded with `pad_id` where the call `pads`. Otherwise it goes on until
    it is as long as the longest. What the first of the `ranks` is answered counts.
    """

    criteria: StoppingCriteriaList
    streamer: BaseStreamer | None
    asked: int  # the length up to which they have been asked, at first of the prompts
    pads: bool
    pad_id: int
    ranks: Ranks

    def ask(self, rows: Sequence[Row]) -> None:
        """Asks about the lengths that all rows have come to since, stops rows, and streams."""
        while self.asked < self._reached(rows):
            self.asked += 1
            ids = padded(rows, self.asked, self.pads, self.pad_id)
            stops = self.ranks.agree(self.criteria(ids, None).tolist()) if self.criteria else []
            for row, stopped in zip(rows, stops, strict=bool(stops)):
                if stopped:
                    row.stop_at(self.asked)
            if self.streamer is not None:
                self.streamer.put(ids[:, -1].cpu())

    def _reached(self, rows: Sequence[Row]) -> int:
        """The length that the call has come to, were its rows decoded in step."""
        going = [len(row) for row in rows if not (row.finished and self.pads)]
        return min([*going, longest_row(rows)])


def criteria_of_rows(
    criteria: StoppingCriteriaList,
) -> tuple[StoppingCriteriaList, StoppingCriteriaList]:
    """Those that each of several rows asks, and those that are asked about the batch."""
    knows_rows = [type(each).__module__.startswith("transformers.generation.") for each in criteria]
    pairs = list(zip(criteria, knows_rows, strict=True))
    return (
        StoppingCriteriaList([each for each, by_row in pairs if by_row]),
        StoppingCriteriaList([each for each, by_row in pairs if not by_row]),
    )
