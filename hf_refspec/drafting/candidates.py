"""transformers' candidate generators as drafters, and a drafter as one of them."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import numpy as np
import torch
from transformers.generation import CandidateGenerator, PromptLookupCandidateGenerator

from .contract import Call, Drafter, Observation, checked_draft, owned
from .stats import DraftStats
from .tree import DraftTree

# Assisted decoding names no vocabulary (any id of an int32 may be a token), and no budget.
_ANY_VOCABULARY = 2**31 - 1
_ASSISTED_DRAFT_TOKENS = 10


class CandidateChain(Drafter):
    """Drafts the candidates of a `CandidateGenerator` (prompt look-up, an assistant, your own).

    Its candidates are verified as a chain against the target's own choice, sampled or greedy. The
    logits that it may return serve as estimates of what will be accepted."""

    decides_length = True
    _of_a_call = (*Drafter._of_a_call, "_ids", "_drafted")

    def __init__(self, generator: CandidateGenerator) -> None:
        self.generator = generator

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._ids = torch.from_numpy(prompt_ids)[None]
        self._drafted: DraftTree | None = None

    def draft(self, budget: int, call: Call) -> DraftTree:
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        # An assistant may sample, or have dropout; look-up draws nothing, other threads may.
        draws = not isinstance(self.generator, PromptLookupCandidateGenerator)
        with torch.random.fork_rng(devices, enabled=draws):
            candidate_ids, logits = self.generator.get_candidates(self._ids)
        tokens = candidate_ids[0, self._ids.shape[1] :][:budget]
        probs = None
        if logits is not None and logits.shape[1] >= len(tokens):  # (1, m, vocab_size)
            all_probs = logits[0, : len(tokens)].float().softmax(dim=-1)
            chosen = all_probs.gather(1, tokens[:, None].to(logits.device))[:, 0].nan_to_num(0.0)
            probs = chosen.cumprod(dim=0).clamp(max=1.0).numpy(force=True)
        self._drafted = DraftTree.chain(tokens.numpy(force=True), probs)
        return self._drafted

    def observe(self, observation: Observation) -> None:
        tokens = observation.tokens
        logits = observation.logits
        self._ids = torch.cat([self._ids, torch.from_numpy(tokens)[None]], dim=-1)
        if self._drafted is not None and logits is not None:
            # As if its T candidates had been verified alone: logits (1, 1 + T, vocab_size), and how
            # many candidates were right.
            path = observation.verified.along(self._drafted.tokens.tolist())
            scores = logits[[0, *(1 + node for node in path)]][None]
            pairs = zip(self._drafted.tokens[: len(path)], tokens[:-1], strict=False)
            right = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            self.generator.update_candidate_strategy(self._ids, scores, right)
        self._drafted = None


class AssistedDrafts(CandidateGenerator):
    """A drafter for transformers' own assisted decoding, as a `CandidateGenerator`.

    It proposes chains of up to 10 tokens, as transformers' prompt look-up does: assisted decoding
    sets no budget."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._stats: DraftStats | None = None  # the present text's
        self._ids = np.empty(0, dtype=np.int64)  # the present text so far

    def __reduce__(self) -> tuple[Any, ...]:
        return AssistedDrafts, (self.drafter,)

    def get_candidates(
        self, input_ids: torch.LongTensor, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns `input_ids` `(1, n)` followed by a chain of m draft tokens, `(1, n + m)`, and
        `None`, as there are no draft logits. Ids that continue those of the last call belong to its
        text; others begin a new one."""
        if input_ids.shape[0] != 1:
            raise ValueError(f"input_ids must have one row, but has {input_ids.shape[0]}")
        ids = input_ids[0].numpy(force=True).copy()
        drafter = self.drafter
        with owned(drafter):
            is_begun = drafter.stats is self._stats  # no other call has begun since
            if not is_begun or not np.array_equal(ids[: len(self._ids)], self._ids):
                if is_begun:
                    drafter.end()
                self._stats = drafter.stats = DraftStats()
                drafter.begin(ids, _ANY_VOCABULARY)
            elif len(ids) > len(self._ids):
                drafter.observe(Observation(ids[len(self._ids) :]))
            self._ids = ids
            chain = checked_draft(
                drafter, _ASSISTED_DRAFT_TOKENS, Call(chain=True), _ANY_VOCABULARY
            )
        draft_ids = torch.from_numpy(chain.tokens).to(input_ids.device)
        return torch.cat((input_ids, draft_ids[None]), dim=1), None

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int
    ) -> None:
        """Does nothing: `get_candidates` sees which tokens were accepted."""
