"""Any transformers `CandidateGenerator` as a drafter."""

from __future__ import annotations

import numpy as np
import torch
from transformers.generation.candidate_generator import CandidateGenerator

from .drafter import Drafter
from .observation import Observation
from .tree import DraftTree


class CandidateChain(Drafter):
    """Drafts what a `CandidateGenerator` proposes (prompt look-up, an assistant model, your own).

    Its candidates are verified as a chain against the target's own choice, sampled or greedy; the
    logits that a generator may give along are not needed for that."""

    decides_length = True

    def __init__(self, generator: CandidateGenerator) -> None:
        self.generator = generator

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._ids = torch.from_numpy(prompt_ids)[None]
        self._asked = False

    def draft(self, budget: int) -> DraftTree:
        candidate_ids, _ = self.generator.get_candidates(self._ids)
        self._asked = True
        return DraftTree.chain(candidate_ids[0, self._ids.shape[1] :][:budget].numpy(force=True))

    def observe(self, observation: Observation) -> None:
        tokens, logits = observation.tokens, observation.logits
        self._ids = torch.cat([self._ids, torch.from_numpy(tokens)[None]], dim=-1)
        if self._asked and logits is not None:
            # (1, 1 + T, vocab_size), and how many of the T candidates were right.
            self.generator.update_candidate_strategy(self._ids, logits[None], len(tokens) - 1)
        self._asked = False
