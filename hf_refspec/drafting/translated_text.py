"""A text as an assistant model with another tokenizer reads it: universal assisted decoding."""

from __future__ import annotations

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.candidate_generator import (
    AssistedCandidateGeneratorDifferentTokenizers,
)


class TranslatedText:
    """Chains of an assistant model for one text, by transformers' own generator."""

    def __init__(
        self,
        assistant: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        assistant_tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        # Greedy: a sample would use up the random numbers of the call.
        config = GenerationConfig(do_sample=False, min_length=0, max_length=None)
        no_ids = torch.empty((1, 0), dtype=torch.int64)
        tokenizers = tokenizer, assistant_tokenizer
        self._generator = AssistedCandidateGeneratorDifferentTokenizers(
            no_ids,
            assistant,
            *tokenizers,
            config,
            # What is attached to all models drafts for the target.
            {"candidate_generator": None},
        )

    @torch.no_grad()
    def next_tokens(self, ids: np.ndarray, count: int) -> np.ndarray:
        """What the assistant expects after some ids: `count` of its own tokens at most.

        Args:
            ids (`np.ndarray`, int64 of shape `(n,)`): The text.

        Returns:
            `np.ndarray`, int64 of shape `(m,)`: In the target's tokens, as many as they make.
        """
        self._generator.num_assistant_tokens = count
        candidate_ids, _ = self._generator.get_candidates(torch.from_numpy(ids)[None])
        tokens: np.ndarray = candidate_ids[0, len(ids) :].numpy(force=True)
        return tokens
