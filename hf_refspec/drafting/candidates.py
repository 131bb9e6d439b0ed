"""transformers' candidate generators as drafters."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import torch
from transformers.generation import CandidateGenerator, PromptLookupCandidateGenerator

from .contract import Call, Drafter, Observation
from .tree import DraftTree


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
