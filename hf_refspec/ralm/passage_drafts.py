"""Drafts of tokens beside speculated retrieval: both in the same call."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import torch
from transformers import PreTrainedModel

from ..drafting.drafter import Drafter, checked_draft
from ..drafting.tree import DraftTree
from ..generation.budget import make_budget
from ..generation.row import TargetText
from ..verification.positions import depth_limit
from .passage_contexts import Context, PassageContexts


class PassageDrafts:
    """Has a drafter draft from the passage, the prompt and the output, within a step.

    Where the text goes on behind another passage, or after something else than what the drafter was
    told, it begins anew.

    Args:
        drafter ([`Drafter`]): What drafts, in a session of this call.
        model (`PreTrainedModel`): The target model.
        contexts ([`PassageContexts`]): They say what can be verified.
    """

    def __init__(self, drafter: Drafter, model: PreTrainedModel, contexts: PassageContexts) -> None:
        self._drafter = drafter
        self._config = model.config.get_text_config(decoder=True)
        self._takes_trees = contexts.takes_trees
        self._budget = make_budget("auto", drafter, model, contexts.verification)
        # Where the drafter has been told of everything, and how long that was.
        self._context: Context | None = None
        self._length = 0

    def extend(
        self, context: Context, output: torch.Tensor, text: TargetText, most_tokens: int
    ) -> None:
        """A forward pass with a draft that gives at most so many tokens, see [`Context.extend`]."""
        if context is not self._context or self._length != len(text):
            self._begin(context, output)
        length = len(text)
        drafts = context.takes_draft(output.shape[1])
        draft = self._draft(context, output, text, most_tokens) if drafts else DraftTree.empty()
        began = perf_counter()
        logits = context.extend(output, draft, text)
        seconds = perf_counter() - began
        tokens = text.ids[0, length:].numpy(force=True).astype(np.int64)
        if drafts:  # another pass has more to do
            self._budget.record([tokens], 1 + len(draft), seconds)
        self._drafter.observe(tokens, logits)
        self._length = len(text)
        self._drafter.stats.record_pass(drafted=len(draft), accepted=len(tokens) - 1)
        self._drafter.stats.verifying_seconds += seconds

    def roll_back(self) -> None:
        """Is told that the text has gone back."""
        self._context = None

    def finish(self, prompt: np.ndarray, output: np.ndarray) -> None:
        """Tells the drafter what the call has come to, prompt and output, before it ends."""
        self._drafter.begin(prompt, self._config.vocab_size)
        self._drafter.observe(output)

    def _begin(self, context: Context, output: torch.Tensor) -> None:
        ids = torch.cat([context.prefix, output], dim=-1)[0].numpy(force=True).astype(np.int64)
        self._drafter.begin(ids, self._config.vocab_size)
        self._context = context

    def _draft(
        self, context: Context, output: torch.Tensor, text: TargetText, most_tokens: int
    ) -> DraftTree:
        last_position = context.prefix.shape[1] + output.shape[1] - 1
        deepest = min(
            depth_limit(self._config, last_position, len(text), text.max_length), most_tokens - 1
        )
        began = perf_counter()
        draft = DraftTree.empty()
        if self._budget.most > 0 and deepest > 0:
            draft = checked_draft(
                self._drafter,
                self._budget.most,
                self._config.vocab_size,
                chain=not self._takes_trees,
            )
        [draft] = self._budget.trim([self._drafter], [draft.truncated(max(deepest, 0))])
        self._drafter.stats.drafting_seconds += perf_counter() - began
        return draft
