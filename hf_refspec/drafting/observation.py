"""The result of a forward pass of the target model, for drafters."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from .tree import DraftTree


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """The result of one forward pass of the target model for one row.

    Attributes:
        tokens (`np.ndarray`, int64 of shape `(n,)`): The emitted tokens: the accepted draft tokens
            and the one that the target chose after them. Of a prompt, its tokens.
        verified ([`DraftTree`]): The tree of the forward pass, T nodes: the draft, merged with
            other drafters' drafts and trimmed. Empty after the prefill and of a prompt.
        logits (`torch.Tensor` of shape `(1 + T, vocab_size)`, *optional*): The target's raw logits
            after the text so far and after each node of `verified`, accepted or not, on its device;
            valid until the next pass. `None` of a prompt, and where drafts cannot be verified.
        top_tokens (`np.ndarray`, int32 of shape `(1 + T, k)`, *optional*): The best next tokens
            after the text so far and after each node, the best first; k is at least the drafter's
            `observed_top_k`, or the size of the vocabulary. `None` where no drafter of the call
            asked for any. Of a prompt, of shape `(m, k)`: after each of `tokens[-1 - m : -1]`.
        top_probs (`np.ndarray`, float32 of the same shape, *optional*): Their probabilities, about
            the softmax of the raw logits.
        of_prompt (`bool`): Whether it is of the prompt and not of emitted tokens. Drafters whose
            `prompt_fraction` is above 0 receive one such, after the prefill.
    """

    tokens: np.ndarray
    verified: DraftTree = field(default_factory=DraftTree.empty)
    logits: torch.Tensor | None = None
    top_tokens: np.ndarray | None = None
    top_probs: np.ndarray | None = None
    of_prompt: bool = False
