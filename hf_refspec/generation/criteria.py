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
from typing import TYPE_CHECKING

import torch
from transformers import StoppingCriteriaList

from ..verification.ranks import Ranks
from .row import Row

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


class BatchCriteria:
    """Stopping criteria that are asked about all rows of a call at once, once for each length, and
    the streamer that is given these.

    Args:
        criteria (`StoppingCriteriaList`): Any.
        streamer (`BaseStreamer`, *optional*): Gets a token of each row, the padding too.
        length (`int`): Of the prompts.
        pads (`bool`): Whether a row that has ended is padded. If not, it goes on until it is as
            long as the longest.
        pad_id (`int`): With what.
        ranks ([`Ranks`]): Those that decode these rows; what the first one is answered counts.
    """

    def __init__(
        self,
        criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
        length: int,
        pads: bool,
        pad_id: int,
        ranks: Ranks,
    ) -> None:
        self._criteria = criteria
        self._streamer = streamer
        self._asked = length
        self.pads = pads
        self._pad_id = pad_id
        self._ranks = ranks

    def ask(self, rows: Sequence[Row]) -> None:
        """Asks about the lengths that all rows have come to since, stops rows, and streams."""
        if not self._criteria and self._streamer is None:
            return
        while self._asked < self._reached(rows):
            self._asked += 1
            ids = padded(rows, self._asked, self.pads, self._pad_id)
            stops = self._ranks.agree(self._criteria(ids, None).tolist()) if self._criteria else []
            for row, stopped in zip(rows, stops, strict=bool(stops)):
                if stopped:
                    row.stop_at(self._asked)
            if self._streamer is not None:
                self._streamer.put(ids[:, -1].cpu())

    def _reached(self, rows: Sequence[Row]) -> int:
        """The length that the call has come to, were its rows decoded in step."""
        going = [len(row) for row in rows if not (row.finished and self.pads)]
        return min([*going, longest_row(rows)])


def criteria_of_rows(
    criteria: StoppingCriteriaList, rows: int
) -> tuple[StoppingCriteriaList, StoppingCriteriaList]:
    """Those that each row asks, and those that are asked about the batch; a single row asks all."""
    if rows == 1:
        return criteria, StoppingCriteriaList()
    knows_rows = [type(each).__module__.startswith("transformers.generation.") for each in criteria]
    pairs = list(zip(criteria, knows_rows, strict=True))
    return (
        StoppingCriteriaList([each for each, by_row in pairs if by_row]),
        StoppingCriteriaList([each for each, by_row in pairs if not by_row]),
    )


def longest_row(rows: Sequence[Row]) -> int:
    """How long the output will at least be: plain decoding ends where the last row is stopped."""
    return max(row.stopped_at or len(row) for row in rows)


def own_length(row: Row, pads: bool) -> int:
    """How many tokens of a row are returned as they are; padding follows."""
    return row.stopped_at if pads and row.stopped_at is not None else len(row)


def padded(rows: Sequence[Row], length: int, pads: bool, pad_id: int) -> torch.Tensor:
    """The first tokens of all rows, `(R, length)`: rows that have ended before are padded."""
    ids = rows[0].ids.new_full((len(rows), length), pad_id)
    for i, row in enumerate(rows):
        end = min(own_length(row, pads), length)
        ids[i, :end] = row.ids[0, :end]
    return ids
