"""Acceptance: which draft tokens are what the target model chooses, and what follows from each.

Every row walks down its own draft, and they choose together: where logits processors need not know
the text (temperature, top-k, top-p), the next tokens of all rows that still walk are chosen in one
call, and without processors the greedy choice is one call for all nodes. So the host synchronises
once when greedy, otherwise once per accepted depth, and not for each token of each row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import (
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

from ..drafting.top_tokens import top_tokens
from ..drafting.tree import ROOT
from .row import Row, choose_tokens

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


def accept(
    rows: Sequence[Row], logits: torch.Tensor, choices: np.ndarray | None = None
) -> list[list[int] | None]:
    """Each row takes the nodes of its `verified` tree that the target model chooses, and one token
    more.

    Args:
        rows (sequence of [`Row`]): R rows of one call.
        logits (`torch.Tensor` of shape `(R, 1 + T, vocab_size)`): The target model's, after each
            row so far and after each node of its tree.
        choices (`np.ndarray`, int32 of shape `(R, 1 + T)`, *optional*): The argmax of the logits
            where it is known.

    Returns:
        The accepted nodes of each row, from the root on; `None` for rows that stand still.
    """
    greedy = None
    if rows[0].chooses_by_logits_alone():  # all nodes in one copy
        greedy = (top_tokens(logits, 0).choices if choices is None else choices).tolist()
    children = [row.verified.children() for row in rows]
    paths: list[list[int]] = [[] for _ in rows]
    walking = [i for i, row in enumerate(rows) if not row.stands_still]
    while walking:
        nodes = [paths[i][-1] if paths[i] else ROOT for i in walking]
        if greedy is None:
            tokens = _choose(rows, logits, walking, nodes)
        else:
            tokens = [greedy[i][1 + node] for i, node in zip(walking, nodes, strict=True)]
        still_walking = []
        for i, node, token in zip(walking, nodes, tokens, strict=True):
            stopped = rows[i].append(token)
            child = children[i].get((node, token))
            if child is not None and not stopped:
                paths[i].append(child)
                still_walking.append(i)
        walking = still_walking
    return [None if row.stands_still else path for row, path in zip(rows, paths, strict=True)]


def _choose(
    rows: Sequence[Row], logits: torch.Tensor, walking: list[int], nodes: list[int]
) -> list[int]:
    """The next token of each row that walks, at these nodes of their drafts."""
    processors = rows[0].logits_processor
    together = rows[0].generator is None and all(type(p) in _BLIND_TO_IDS for p in processors)
    if len(walking) == 1 or not together:
        return [rows[i].choose(logits[i, 1 + node]) for i, node in zip(walking, nodes, strict=True)]
    no_ids = torch.empty((len(walking), 0), dtype=torch.int64, device=logits.device)
    at_nodes = logits[walking, [1 + node for node in nodes]].to(torch.float32)  # a copy
    return choose_tokens(processors(no_ids, at_nodes), rows[0].do_sample)
