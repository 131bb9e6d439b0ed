"""A step: what one forward pass does with a row, and which draft tokens the row accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
from ..drafting.tree import ROOT, DraftTree
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


@dataclass
class Step:
    """A row in one pass.

    Attributes:
        row ([`Row`]): The text.
        is_idle (`bool`): Whether it takes no part in the pass.
        draft ([`DraftTree`]): What was drafted to follow it.
        verified ([`DraftTree`]): The part of the draft that the pass verifies.
        root (`int`): Where its logits begin among those of the pass: the ones after its last token.
        path (`list[int]`, *optional*): The nodes of `verified` that were accepted, from the root
            on; `None` before that, and if the row is idle.
    """

    row: Row
    is_idle: bool = False
    draft: DraftTree = field(default_factory=DraftTree.empty)
    verified: DraftTree = field(default_factory=DraftTree.empty)
    root: int = 0
    path: list[int] | None = None

    @property
    def emitted(self) -> np.ndarray:
        """The tokens of the pass, int64 of shape `(n,)`; none if the row is idle."""
        return self.row.tail(0 if self.path is None else len(self.path) + 1)


def accept(steps: Sequence[Step], logits: torch.Tensor, choices: np.ndarray | None = None) -> None:
    """Each row takes the nodes of its verified tree that the target model chooses, and one token
    more.

    Every row walks down its own draft, and they choose together: where logits processors need not
    know the text (temperature, top-k, top-p), the next tokens of all rows that still walk are
    chosen in one call, and without processors the greedy choice is one call for all nodes. So the
    host synchronises once when greedy, otherwise once per accepted depth.

    `logits` `(N, vocab_size)` are the target model's: from each step's `root` on, those after the
    row so far and after each node of its tree; `choices` `(N,)` are their argmax where it is known.
    """
    greedy: list[int] = []
    if any(step.row.chooses_by_logits_alone() for step in steps):  # all nodes in one copy
        if choices is None:
            drafted = any(len(step.verified) for step in steps)
            choices = top_tokens(logits[None] if drafted else logits[:, None], 0).choices.ravel()
        greedy = choices.tolist()
    walks: list[tuple[Step, list[int], dict[tuple[int, int], int]]] = []
    for step in steps:
        if not step.is_idle:
            path: list[int] = []
            step.path = path
            walks.append((step, path, step.verified.children()))
    while walks:
        nodes = [path[-1] if path else ROOT for _, path, _ in walks]
        places = [step.root + 1 + node for (step, _, _), node in zip(walks, nodes, strict=True)]
        tokens = _choose([step.row for step, _, _ in walks], logits, places, greedy)
        further = []
        for (step, path, children), node, token in zip(walks, nodes, tokens, strict=True):
            child = children.get((node, token))
            if not step.row.append(token) and child is not None:
                path.append(child)
                further.append((step, path, children))
        walks = further


def _choose(
    rows: Sequence[Row], logits: torch.Tensor, places: list[int], greedy: list[int]
) -> list[int]:
    """The next token of each row, by its logits at one of these places; `greedy` are the argmax of
    all logits, where a row needs no more than that. Rows choose in one call where none has logits
    processors or random numbers of its own, and no processor looks at the text."""
    first = rows[0]
    blind = len(rows) > 1 and all(type(each) in _BLIND_TO_IDS for each in first.logits_processor)
    alike = blind and all(
        row.generator is None
        and row.do_sample == first.do_sample
        and row.scores is None
        and row.logits is None
        and list(map(id, row.logits_processor)) == list(map(id, first.logits_processor))
        for row in rows
    )
    if not alike:
        return [
            greedy[place] if row.chooses_by_logits_alone() else row.choose(logits[place])
            for row, place in zip(rows, places, strict=True)
        ]
    if first.chooses_by_logits_alone():
        return [greedy[place] for place in places]
    no_ids = torch.empty((len(rows), 0), dtype=torch.int64, device=logits.device)
    index = torch.tensor(places).to(logits.device, non_blocking=True)
    chosen = logits[index].to(torch.float32)  # a copy
    return choose_tokens(rows, first.logits_processor(no_ids, chosen))
