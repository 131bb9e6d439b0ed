"""Drafters for `"auto"`, a datastore or a `CandidateGenerator`, and one for transformers."""

from __future__ import annotations

import logging
import os
from difflib import get_close_matches
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import CandidateGenerator

from ..did_you_mean import did_you_mean
from ..text_tokenizer import text_tokenizer
from .call_options import Call
from .calls import owned
from .drafter import Blend, Drafter, checked_draft
from .observation import Observation
from .reference_copy import ReferenceCopy
from .sibling_copy import SiblingCopy
from .token_recycling import TokenRecycling
from .tree import DraftTree

logger = logging.getLogger("hf_refspec")

# Assisted decoding names no vocabulary (any id of an int32 may be a token), and no budget.
_ANY_VOCABULARY = 2**31 - 1
_ASSISTED_DRAFT_TOKENS = 10
# How the drafters that users name are constructed, for messages.
_CONSTRUCTORS = {
    "referencecopy": "rs.ReferenceCopy()",
    "tokenrecycling": "rs.TokenRecycling()",
    "sessiondrafts": "rs.SessionDrafts()",
    "siblingcopy": "rs.SiblingCopy()",
    "datastoredrafts": "rs.DatastoreDrafts(store)",
    "draftmodel": "rs.DraftModel(assistant)",
    "grammardrafts": "rs.GrammarDrafts(tokenizer, json_schema=...)",
}


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
    _of_a_call = (*Drafter._of_a_call, "_ids", "_drafted")

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
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):  # an assistant may sample, or have dropout
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


class AssistedDrafts(CandidateGenerator):
    """A drafter for transformers' own assisted decoding, as a `CandidateGenerator`.

    It proposes chains of up to 10 tokens, as transformers' prompt look-up does: assisted decoding
    sets no budget."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = as_drafter(drafter)
        self._call: Call | None = None  # of the present text
        self._ids = np.empty(0, dtype=np.int64)  # the present text so far

    def __reduce__(self) -> tuple[Any, ...]:
        return AssistedDrafts, (self.drafter,)

    def get_candidates(
        self, input_ids: torch.LongTensor, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns `input_ids` `(1, n)` followed by a chain of m draft tokens, `(1, n + m)`, and
        `None`, as there are no draft logits. Ids that continue those of the last call belong to its
        text; others begin a new one."""
        if input_ids.shape[0] != 1:
            raise ValueError(f"input_ids must have one row, but has {input_ids.shape[0]}")
        ids = input_ids[0].numpy(force=True).copy()
        drafter = self.drafter
        with owned(drafter):
            is_begun = drafter.call is self._call
            if not is_begun or not np.array_equal(ids[: len(self._ids)], self._ids):
                if is_begun:
                    drafter.end()
                self._call = drafter.call = Call(chain=True)
                drafter.begin(ids, _ANY_VOCABULARY)
            elif len(ids) > len(self._ids):
                drafter.observe(Observation(ids[len(self._ids) :]))
            self._ids = ids
            chain = checked_draft(drafter, _ASSISTED_DRAFT_TOKENS, _ANY_VOCABULARY)
        draft_ids = torch.from_numpy(chain.tokens).to(input_ids.device)
        return torch.cat((input_ids, draft_ids[None]), dim=1), None

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int
    ) -> None:
        """Does nothing: `get_candidates` sees which tokens were accepted."""


def as_drafter(value: Any, role: str = "`candidate_generator`") -> Drafter:
    """The drafter for a call's `candidate_generator`: of `"auto"`, a datastore or a transformers
    `CandidateGenerator` as well, also inside of a [`Blend`]. Raises a TypeError for anything else,
    which names the argument by its `role`."""
    if isinstance(value, Blend) and not all(isinstance(part, Drafter) for part in value.sources):
        value.set_sources([as_drafter(part, f"a source of {role}") for part in value.sources])
    if isinstance(value, Drafter):
        return value
    if isinstance(value, str) and value == "auto":
        copy, recycling = default_sources()
        recycling.kept_at_model = True
        return Blend([copy, recycling, SiblingCopy()])
    if isinstance(value, CandidateGenerator):
        return CandidateChain(value)
    from ..store.datastore import Datastore  # loaded only where a store is given
    from .datastore_drafts import DatastoreDrafts

    if isinstance(value, Datastore):
        return DatastoreDrafts(value)
    raise TypeError(
        f'{role} must be "auto", a drafter of hf_refspec or a transformers `CandidateGenerator`, '
        f"but is {_shown_with_remedy(value)}."
    )


def _shown_with_remedy(value: Any) -> str:
    """Describes an argument that is not a drafter, and how to draft from it, for a message."""
    is_name = isinstance(value, str | os.PathLike | type)
    remedies: dict[Any, str] = {
        type: "pass an instance, not the class",
        PreTrainedModel: "a model drafts as `rs.DraftModel(model)`",
        (list, tuple): "join drafters with `|`, as in `rs.ReferenceCopy() | store`",
        (str, os.PathLike): "open a datastore by `rs.Datastore.from_pretrained(repo_or_path)`",
    }
    remedy = next((f": {remedies[kind]}" for kind in remedies if isinstance(value, kind)), "")
    if isinstance(value, str):
        name = value.removeprefix("rs.").partition("(")[0].replace("_", "").lower()
        close = get_close_matches(name, _CONSTRUCTORS, n=1, cutoff=0.9)
        named = f": pass `{_CONSTRUCTORS[close[0]]}`, not its name" if close else ""
        remedy = named or did_you_mean(value, ["auto"]) or remedy
    return f"{value!r}{remedy}" if is_name else f"of the type {type(value).__name__}{remedy}"


def check_datastores(
    generator: Any, model: PreTrainedModel, tokenizer: Any, memo: dict[Any, Any]
) -> None:
    """Warns, once for each, of datastores in a `candidate_generator` that were made with another
    tokenizer than the call's; if the call has none, than the one that is stored with the model on
    this machine, unless that has the same name. The model's `memo` keeps what was compared. No
    datastore is refused: the text is the same, and the user may have extended the tokenizer."""
    sources = generator.sources if isinstance(generator, Drafter) else [generator]
    stores = [getattr(source, "store", source) for source in sources]
    if all(store is None or isinstance(store, (Drafter, str)) for store in stores):
        return
    from ..store.datastore import Datastore
    from ..store.files import DatastoreError
    from ..store.names import local_tokenizer
    from ..store.stored_tokenizer import public_name

    known = text_tokenizer(tokenizer)
    known = known if getattr(known, "is_fast", False) else None
    for store in stores:
        if not isinstance(store, Datastore):
            continue
        key = ("datastore", store.config.fingerprint, known is None)
        if key in memo:
            continue
        memo[key] = True
        compared = known
        if known is None and store.config.tokenizer != public_name(model):
            compared = local_tokenizer(getattr(model, "name_or_path", ""))
        try:
            if compared is not None:
                store.check_tokenizer(compared)
        except DatastoreError as error:
            logger.warning("hardly any draft of this datastore will be accepted: %s", error)
