"""Any transformers `CandidateGenerator` as a drafter."""

from __future__ import annotations

import numpy as np
import torch
from transformers.generation.candidate_generator import CandidateGenerator

from .drafter import Drafter
from .tree import DraftTree


class CandidateChain(Drafter):
    """Drafts what a `CandidateGenerator` proposes (prompt look-up, an assistant model, your own).

    Its candidates are verified as a chain against the target's own choice, sampled or greedy; the
    logits that a generator may give along are not needed for that.

    Args:
        generator (`CandidateGenerator`): Asked once a step; it decides how long its drafts are.
    """

    decides_length = True

    def __init__(self, generator: CandidateGenerator) -> None:
        self.generator = generator

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._ids = torch.from_numpy(prompt_ids)[None]
        self._drafted: int | None = None

    def draft(self, budget: int) -> DraftTree:
        candidate_ids, _ = self.generator.get_candidates(self._ids)
        tokens = candidate_ids[0, self._ids.shape[1] :][:budget].numpy(force=True)
        self._drafted = len(tokens)
        return DraftTree.chain(tokens)

    def observe(self, tokens: np.ndarray, logits: torch.Tensor | None = None) -> None:
        self._ids = torch.cat([self._ids, torch.from_numpy(tokens)[None]], dim=-1)
        if self._drafted is not None and logits is not None:
            # What the generator is told is (1, 1 + drafted, vocab_size) and how many were right.
            scores = logits[None, : 1 + self._drafted]
            self.generator.update_candidate_strategy(self._ids, scores, len(tokens) - 1)
        self._drafted = None
