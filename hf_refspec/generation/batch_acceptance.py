"""Acceptance for several rows: each walks down its own draft, and they choose together.

What a row emits is what [`TargetText`] alone would emit. But where logits processors need not know
the text (temperature, top-k, top-p), the next tokens of all rows that still walk are chosen in one
call, and without processors the greedy choice is one call for all nodes. So a GPU is waited for as
often as the longest walk has steps, or once, and not for each token of each row.
"""

from __future__ import annotations

import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ..drafting.tree import ROOT, DraftTree
from .row import TargetText

_BLIND_TO_IDS = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)


class BatchAcceptance:
    """Chooses the next tokens of several texts.

    Args:
        logits_processor (`LogitsProcessorList`): The call's own.
        do_sample (`bool`): Whether to sample.
    """

    def __init__(self, logits_processor: LogitsProcessorList, do_sample: bool) -> None:
        self._processors = logits_processor
        self._do_sample = do_sample
        self._at_once = not do_sample and len(logits_processor) == 0
        self._together = all(type(each) in _BLIND_TO_IDS for each in logits_processor)

    def accept(
        self, texts: list[TargetText], logits: torch.Tensor, drafts: list[DraftTree]
    ) -> list[list[int]]:
        """Walks down each draft as far as the target model says the same, see
        [`TargetText.accept`]; `path` of each text is its way.

        Args:
            texts (`list[TargetText]`): R texts.
            logits (`torch.Tensor` of shape `(R, 1 + T, vocab_size)`): The target model's, after
                each text so far and after each node of its draft.
            drafts (`list[DraftTree]`): One for each text, of at most T nodes.

        Returns:
            The new tokens of each text.
        """
        choices = logits.argmax(dim=-1).tolist() if self._at_once else None
        children = [draft.children() for draft in drafts]
        new_tokens: list[list[int]] = [[] for _ in texts]
        for text in texts:
            text.path = []
        nodes = [ROOT] * len(texts)
        walking = list(range(len(texts)))
        while walking:
            if choices is None:
                places = [1 + nodes[row] for row in walking]
                chosen_from = logits[walking, places] if any(places) else logits[:, 0]
                tokens = self._choose([texts[row] for row in walking], chosen_from)
            else:
                tokens = [choices[row][1 + nodes[row]] for row in walking]
            still_walking = []
            for row, token in zip(walking, tokens, strict=True):
                new_tokens[row].append(token)
                texts[row].append(token)
                child = children[row].get((nodes[row], token))
                if child is not None and not texts[row].finished:
                    texts[row].path.append(child)
                    nodes[row] = child
                    still_walking.append(row)
            walking = still_walking
        return new_tokens

    def _choose(self, texts: list[TargetText], logits: torch.Tensor) -> list[int]:
        """The next token of each text, from logits `(len(texts), vocab_size)`."""
        if not self._together:
            return [text.choose(each) for text, each in zip(texts, logits, strict=True)]
        no_ids = torch.empty((len(texts), 0), dtype=torch.int64, device=logits.device)
        scores = self._processors(no_ids, logits.to(copy=True, dtype=torch.float32))
        if self._do_sample:
            probs = torch.nn.functional.softmax(scores, dim=-1)
            return torch.multinomial(probs, num_samples=1)[:, 0].tolist()
        return scores.argmax(dim=-1).tolist()
