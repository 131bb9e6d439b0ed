"""Drafters for `"auto"`, a datastore or a transformers `CandidateGenerator`."""

from __future__ import annotations

import os
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import CandidateGenerator

from ..did_you_mean import did_you_mean
from .drafter import Drafter
from .observation import Observation
from .reference_copy import ReferenceCopy
from .sibling_copy import SiblingCopy
from .token_recycling import TokenRecycling
from .tree import DraftTree


def default_sources(
    references: list[str] | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[ReferenceCopy, TokenRecycling]:
    """`ReferenceCopy` for what repeats, and `TokenRecycling` for the rest."""
    return ReferenceCopy(references, tokenizer), TokenRecycling()


class CandidateChain(Drafter):
    """Drafts the candidates of a `CandidateGenerator` (prompt look-up, an assistant, your own).

    Its candidates are verified as a chain against the target's own choice, sampled or greedy. The
    logits that it may return serve as estimates of what will be accepted."""

    decides_length = True

    def __init__(self, generator: CandidateGenerator) -> None:
        if generator.requires_model_outputs:
            raise ValueError(
                f"`candidate_generator` is a {type(generator).__name__}, which drafts from the "
                "target model's hidden states. Only generators that draft from token ids are "
                "supported; call `generate(assistant_model=...)` (or `use_mtp=True`) without a "
                "drafter, or draft by a model of its own: `rs.DraftModel(assistant)`."
            )
        self.generator = generator

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._ids = torch.from_numpy(prompt_ids)[None]
        self._drafted: DraftTree | None = None

    def draft(self, budget: int) -> DraftTree:
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
        tokens, logits = observation.tokens, observation.logits
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


def as_drafter(generator: Any) -> Drafter:
    """The drafter for a call's `candidate_generator`; refuses anything that cannot draft."""
    drafter = as_source(generator)
    if drafter is None:
        raise TypeError(
            '`candidate_generator` must be "auto", a drafter of hf_refspec or a transformers '
            f"`CandidateGenerator`, but is {shown_with_remedy(generator)}."
        )
    return drafter


def shown_with_remedy(value: Any) -> str:
    """Describes an argument that is not a drafter, and how to draft from it, for a message."""
    is_name = isinstance(value, str | os.PathLike | type)
    remedies: dict[Any, str] = {
        type: "pass an instance, not the class",
        PreTrainedModel: "a model drafts as `rs.DraftModel(model)`",
        (list, tuple): "join drafters with `|`, as in `rs.ReferenceCopy() | store`",
        (str, os.PathLike): "open a datastore by `rs.Datastore.from_pretrained(repo_or_path)`",
    }
    remedy = next((f": {remedies[kind]}" for kind in remedies if isinstance(value, kind)), "")
    hint = did_you_mean(value, ["auto"]) if isinstance(value, str) else ""
    return f"{value!r}{hint or remedy}" if is_name else f"a {type(value).__name__}{remedy}"


def as_source(value: Any) -> Drafter | None:
    """The drafter for `"auto"`, a datastore or a `CandidateGenerator`; `None` for anything else."""
    if isinstance(value, Drafter):
        return value
    if isinstance(value, str) and value == "auto":
        copy, recycling = default_sources()
        recycling.kept_at_model = True
        return copy | recycling | SiblingCopy()
    if isinstance(value, CandidateGenerator):
        return CandidateChain(value)
    from ..store.datastore import Datastore  # loaded only where a store is given
    from .datastore_drafts import DatastoreDrafts

    return DatastoreDrafts(value) if isinstance(value, Datastore) else None
