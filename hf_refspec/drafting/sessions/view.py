"""The sessions at one moment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...index.segments import Documents, LinkedDocuments, Segment
from ...index.similar_prompts import similar_prompts


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The sessions at one moment, numbered in order of arrival; it never changes.

    Attributes:
        segments (`tuple[Segment, ...]`): All but the newest sessions.
        tail ([`LinkedDocuments`]): The newest.
        oldest (`int`): The first that is remembered; earlier ones may still be in a segment.
        largest_id (`int`): The largest token id; -1 if there is none.
    """

    segments: tuple[Segment, ...]
    tail: LinkedDocuments
    oldest: int
    largest_id: int

    def __len__(self) -> int:
        return self.tail.end - self.oldest

    def session(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The prompt and the output of a session."""
        parts: tuple[Documents, ...] = self.segments
        return next((each for each in parts if number < each.end), self.tail).document(number)

    def sessions(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The prompts and outputs of all sessions, the oldest first."""
        return [self.session(number) for number in range(self.oldest, self.tail.end)]

    def similar_outputs(self, prompt: np.ndarray, count: int) -> list[np.ndarray]:
        """The outputs of the `count` sessions with the most similar prompts, the best one last."""
        parts = (*self.segments, self.tail)
        numbers = similar_prompts(parts, prompt, self.oldest, count, self.largest_id + 1)
        return [self.session(number)[1] for number in numbers]
