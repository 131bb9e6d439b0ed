"""A step: what one forward pass does with a row, and which draft tokens the row accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers.generation import logits_process

from ..drafting.top_tokens import top_tokens
from ..drafting.tree import ROOT, DraftTree
from .row import Row, checked_tokens, choose_tokens, drawn

_BLIND_TO_IDS = (
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
    logits_process.MinPLogitsWarper,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TypicalLogitsWarper,
)


@dataclass
class Step:
    """A row in one pass.

    Attributes:
        row ([`Row`]): The text.
        is_idle (`bool`): Whether it takes no part in the pass.
        draft ([`DraftTree`]): The draft of what follows it.
        verified ([`DraftTree`]): The part of the draft that the pass verifies.
        root (`int`): The place of the logits after its last token among those of the pass.
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
    def places(self) -> range:
        """The places of its logits among those of the pass: after the row, and each node."""
        return range(self.root, self.root + 1 + len(self.verified))

    @property
    def emitted(self) -> np.ndarray:
        """The tokens of the pass, int64 of shape `(n,)`; none if the row is idle."""
        return self.row.tail(0 if self.path is None else len(self.path) + 1)


def accept(steps: Sequence[Step], logits: torch.Tensor, choices: np.ndarray | None = None) -> None:
    """Each row takes the nodes of its verified tree that the target model chooses, and one token
    more.

    Every row walks down its own draft, and they choose together: where logits processors do not
    look at the text (temperature, top-k, top-p), one call chooses the next tokens of all rows that
    still walk. Greedy tokens without processors are chosen at all nodes in one call, as are sampled
    tokens on any device but a CPU. Otherwise the host waits once per accepted depth.

    `logits` `(N, vocab_size)` are those after each row (from its step's `root` on) and after each
    node of its tree; `choices` `(N,)` are their argmax where it is known.
    """
    known = _known_tokens(steps, logits, choices)
    walks: list[tuple[Step, list[int], dict[tuple[int, int], int]]] = []
    for step in steps:
        if not step.is_idle:
            path: list[int] = []
            step.path = path
            walks.append((step, path, step.verified.children()))
    while walks:
        nodes = [path[-1] if path else ROOT for _, path, _ in walks]
        places = [step.root + 1 + node for (step, _, _), node in zip(walks, nodes, strict=True)]
        tokens = _choose([step.row for step, _, _ in walks], logits, places, known)
        further = []
        for (step, path, children), node, token in zip(walks, nodes, tokens, strict=True):
            child = children.get((node, token))
            if not step.row.append(token) and child is not None:
                path.append(child)
                further.append((step, path, children))
        walks = further


def _known_tokens(
    steps: Sequence[Step], logits: torch.Tensor, choices: np.ndarray | None
) -> dict[int, int]:
    """The tokens that no processor has to be asked about, by their place in the logits."""
    greedy = [step for step in steps if step.row.chooses_by_logits_alone()]
    known: dict[int, int] = {}
    if greedy:  # all nodes in one copy
        if choices is None:
            drafted = any(len(step.verified) for step in steps)
            choices = top_tokens(logits[None] if drafted else logits[:, None], 0).choices.ravel()
        tokens = choices.tolist()
        known = {place: tokens[place] for step in greedy for place in step.places}
    if logits.device.type != "cpu":  # there each depth would wait for the device
        sampled = [step for step in steps if not step.is_idle and _samples_blindly(step.row)]
        known.update(_sampled_tokens(sampled, logits) if sampled else {})
    return known


def is_blind(processors: Sequence[logits_process.LogitsProcessor]) -> bool:
    """Whether no logits processor looks at the text."""
    return all(type(processor) in _BLIND_TO_IDS for processor in processors)


def _samples_blindly(row: Row) -> bool:
    """Whether a row's tokens depend on nothing but logits and random numbers drawn ahead."""
    return row.noise is not None and is_blind(row.logits_processor) and not row.is_recorded


def _sampled_tokens(steps: Sequence[Step], logits: torch.Tensor) -> dict[int, int]:
    """The tokens at every node of rows that are sampled; the host waits once."""
    vocab_size = logits.shape[-1]
    chosen: list[torch.Tensor] = []
    for step in steps:
        row = step.row
        scores = row.processed_blindly(logits[step.places.start : step.places.stop])
        noise_of = row.noise_ahead(vocab_size)
        depths = [0, *step.verified.depths().tolist()]
        chosen.append(drawn(scores, torch.stack([noise_of(depth) for depth in depths])))
    tokens = checked_tokens(torch.cat(chosen))
    places = [place for step in steps for place in step.places]
    return dict(zip(places, tokens, strict=True))


def _choose(
    rows: Sequence[Row], logits: torch.Tensor, places: list[int], known: dict[int, int]
) -> list[int]:
    """The next token of each row: the `known` one, or by its logits at its place. Rows choose in
    one call if none has logits processors or random numbers of its own, and no processor looks at
    the text."""
    if all(place in known for place in places):
        return [known[place] for place in places]
    first = rows[0]
    alike = (
        len(rows) > 1
        and is_blind(first.logits_processor)
        and all(
            row.generator is None
            and row.do_sample == first.do_sample
            and not row.is_recorded
            and list(map(id, row.logits_processor)) == list(map(id, first.logits_processor))
            for row in rows
        )
    )
    if not alike:
        return [
            known[place] if place in known else row.choose(logits[place])
            for row, place in zip(rows, places, strict=True)
        ]
    index = torch.tensor(places).to(logits.device, non_blocking=True)
    return choose_tokens(rows, first.processed_blindly(logits[index]))
