"""Acceptance: the draft tokens that each row takes of a pass, as the target model chooses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from transformers.generation import logits_process

from ..drafting.top_tokens import TopTokens, top_tokens
from ..drafting.tree import ROOT, DraftTree
from ..kernels.compilation import drafting_kernels
from ..verification.passes import PassResult
from ..verification.ranks import Ranks
from .plan import DraftLimits
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


@dataclass(frozen=True)
class Taken:
    """The part of a pass that a row has taken.

    Attributes:
        path (`list[int]`, *optional*): The accepted nodes of its draft, from the root on; `None` if
            the row took no part in the pass.
        tokens (`np.ndarray`, int64 of shape `(n,)`): The emitted tokens: the path and one more.
        verified (`int`): The number of nodes of its draft that the pass verified.
    """

    path: list[int] | None
    tokens: np.ndarray
    verified: int


@dataclass(frozen=True)
class Accepted:
    """The parts of a pass that its rows have taken.

    Attributes:
        rows (`list[Taken]`): The part of each row.
        seconds (`float`): The time from the beginning of the pass until all tokens were known.
        top ([`TopTokens`], *optional*): The best next tokens at each node, if any drafter needs
            them and the kernels are loaded.
    """

    rows: list[Taken]
    seconds: float
    top: TopTokens | None


@dataclass
class _Walk:
    """A row that walks down its draft tree."""

    row: Row
    tree: DraftTree
    children: dict[tuple[int, int], int]  # of the tree
    places: range  # the indices of its logits in the pass: after the row, and after each node
    place: int  # the index of the logits that choose its next token
    path: list[int]  # the nodes that it has accepted

    def emit(self, token: int, is_same_model: Callable[[], bool] | None) -> bool:
        """Emits a token; True if it is a node of the draft, the row has not ended, and the model is
        still the one that has verified what follows."""
        node = self.children.get((self.path[-1] if self.path else ROOT, token))
        ends = self.row.append(token)
        changed = is_same_model is not None and not is_same_model()
        if changed or ends or node is None:
            return False
        self.path.append(node)
        self.place = self.places[1 + node]
        return True


def accept(
    rows: Sequence[Row],
    drafts: Sequence[DraftTree | None],
    result: PassResult,
    limits: DraftLimits,
) -> Accepted:
    """Each row takes the nodes of its draft that the target model chooses, and one token more. All
    ranks use the first rank's tokens.

    Every row walks down its own draft, and they choose together: where logits processors do not
    look at the text (temperature, top-k, top-p), one call chooses the next tokens of all rows that
    still walk. Greedy tokens without processors are chosen at all nodes in one call, as are sampled
    tokens on any device but a CPU. Otherwise the host waits once per accepted depth.
    """
    logits = result.logits  # (N, vocab_size)
    is_same_model = limits.exactness.watch() if any(row.calls_others for row in rows) else None
    k = max(row.drafter.observed_top_k for row in rows)
    # No token waits for kernels.
    is_ready = drafting_kernels.compiled
    top = top_tokens(logits[None], k) if k > 0 and is_ready else None
    walks = [
        None
        if tree is None
        else _Walk(row, tree, tree.children(), range(root, root + 1 + len(tree)), root, path=[])
        for row, tree, root in zip(rows, drafts, result.roots, strict=True)
    ]
    walking = [walk for walk in walks if walk is not None]
    known = _known_tokens(walking, logits, None if top is None else top.choices[0])
    while walking:
        tokens = _choose(walking, logits, known)
        chosen = zip(walking, tokens, strict=True)
        walking = [walk for walk, token in chosen if walk.emit(token, is_same_model)]
    taken = [
        Taken(None, row.tail(0), 0)
        if walk is None
        else Taken(walk.path, row.tail(len(walk.path) + 1), len(walk.tree))
        for row, walk in zip(rows, walks, strict=True)
    ]
    seconds = perf_counter() - result.began
    if not is_ready and drafting_kernels.ready(in_call=logits.device.type == "cpu") and k > 0:
        top = top_tokens(logits[None], k)
    if not limits.ranks.alone:
        taken = _agreed(rows, taken, limits.ranks)
    return Accepted(taken, seconds, top)


def _agreed(rows: Sequence[Row], taken: list[Taken], ranks: Ranks) -> list[Taken]:
    """Gives all ranks' rows the tokens that the first rank has taken, and returns these."""
    first, ends = ranks.agree((taken, [row.stopped_at for row in rows]))
    for row, own, agreed, end in zip(rows, taken, first, ends, strict=True):
        if row.stopped_at != end or not np.array_equal(own.tokens, agreed.tokens):
            row.replace(len(own.tokens), agreed.tokens.tolist(), end)
    return first


def _known_tokens(
    walks: Sequence[_Walk], logits: torch.Tensor, choices: np.ndarray | torch.Tensor | None
) -> dict[int, int]:
    """The tokens that no processor is asked about, by place in the logits; `choices` is `(N,)`."""
    greedy = [walk for walk in walks if walk.row.takes_argmax]
    known: dict[int, int] = {}
    if greedy:  # all nodes in one copy
        if choices is None:
            # A step without a draft waits for no kernel.
            has_drafts = any(len(walk.tree) for walk in walks)
            choices = top_tokens(logits[None], 0).choices[0] if has_drafts else logits.argmax(-1)
        tokens = choices.tolist()
        known = {place: tokens[place] for walk in greedy for place in walk.places}
    if logits.device.type != "cpu":  # there each depth would wait for the device
        # Their tokens depend on nothing but logits and random numbers drawn ahead.
        sampled = [
            walk
            for walk in walks
            if walk.row.noise is not None
            and is_blind(walk.row.logits_processor)
            and not walk.row.is_recorded
        ]
        known.update(_sampled_tokens(sampled, logits) if sampled else {})
    return known


def is_blind(processors: Sequence[logits_process.LogitsProcessor]) -> bool:
    """True if no logits processor looks at the text."""
    return all(type(processor) in _BLIND_TO_IDS for processor in processors)


def _sampled_tokens(walks: Sequence[_Walk], logits: torch.Tensor) -> dict[int, int]:
    """The tokens at every node of rows that are sampled; the host waits once."""
    vocab_size = logits.shape[-1]
    chosen: list[torch.Tensor] = []
    for walk in walks:
        row = walk.row
        scores = row.processed_blindly(logits[walk.places.start : walk.places.stop])
        noise_of = row.noise_ahead(vocab_size)
        depths = [0, *walk.tree.depths().tolist()]
        chosen.append(drawn(scores, torch.stack([noise_of(depth) for depth in depths])))
    tokens = checked_tokens(torch.cat(chosen))
    places = [place for walk in walks for place in walk.places]
    return dict(zip(places, tokens, strict=True))


def _choose(walks: Sequence[_Walk], logits: torch.Tensor, known: dict[int, int]) -> list[int]:
    """The next token of each row: the `known` one, or by its logits at its place. Rows choose in
    one call if none has logits processors or random numbers of its own, and no processor looks at
    the text."""
    places = [walk.place for walk in walks]
    if all(place in known for place in places):
        return [known[place] for place in places]
    rows = [walk.row for walk in walks]
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
    index = torch.tensor(places, device="cpu").to(logits.device, non_blocking=True)
    return choose_tokens(rows, first.processed_blindly(logits[index]))
