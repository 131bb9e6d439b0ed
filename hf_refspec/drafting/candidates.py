"""Whatever a call may draft from as a drafter: a datastore, any `CandidateGenerator`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.generation.candidate_generator import CandidateGenerator

from ..did_you_mean import did_you_mean
from ..store.datastore import Datastore
from .datastore_drafts import DatastoreDrafts
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


def as_drafter(given: Any) -> Drafter:
    """The drafter for a call's `candidate_generator`; anything that is none is refused."""
    if isinstance(given, Drafter):
        return given
    if isinstance(given, Datastore):
        return DatastoreDrafts(given)
    if not isinstance(given, CandidateGenerator):
        hint = ": pass an instance, not the class" if isinstance(given, type) else ""
        if isinstance(given, str):
            hint = did_you_mean(given, ["auto"])
        raise TypeError(
            '`candidate_generator` must be "auto", a drafter of hf_refspec or a transformers '
            f"`CandidateGenerator`, but is {given!r}{hint}."
        )
    if given.requires_model_outputs:
        raise ValueError(
            f"`candidate_generator` is a {type(given).__name__}, which drafts from the target "
            "model's hidden states. Only generators that draft from token ids are supported."
        )
    return CandidateChain(given)
