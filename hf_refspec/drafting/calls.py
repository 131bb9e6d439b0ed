"""The drafters of one call: what the user gives as one, and the drafter of each row, from `begin`
to `end`."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from typing import Any

import numpy as np
from transformers import PreTrainedModel
from transformers.generation import CandidateGenerator

from ..kernels.compilation import drafting_kernels
from ..messages import did_you_mean
from ..text_tokenizer import text_tokenizer
from .auto import auto_drafter, share_table
from .candidates import CandidateChain
from .contract import Call, Drafter, LookUp, Observation, PathDrafter, owned
from .stats import DraftStats, SourceStats
from .tree import DraftTree

logger = logging.getLogger("hf_refspec")

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


def as_drafter(value: Any, role: str = "`candidate_generator`") -> Drafter:
    """The drafter for a call's `candidate_generator`, which may be `"auto"`, a datastore or a
    transformers `CandidateGenerator`. Raises a TypeError for anything else, which names the
    argument by its `role`, and for a drafter whose methods do not take the call."""
    if isinstance(value, Drafter):
        for source in value.sources:
            _check_signatures(source)
        return value
    if isinstance(value, str) and value == "auto":
        return auto_drafter()
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


def _check_signatures(drafter: Drafter) -> None:
    """Refuses a drafter that was written before `draft` received the call."""
    for contract, name in ((Drafter, "draft"), (PathDrafter, "continue_path"), (LookUp, "look_up")):
        if isinstance(drafter, contract):
            _, *arguments = inspect.signature(getattr(contract, name)).parameters
            given = inspect.signature(getattr(drafter, name))
            try:
                given.bind(*arguments)
            except TypeError:
                raise TypeError(
                    f"{type(drafter).__name__}.{name}{given} must be {name}"
                    f"({', '.join(arguments)}): the options that were `self.call` are an argument"
                ) from None


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


class LateDrafter(Drafter):
    """Takes the place of a drafter, which begins once the kernels are ready, and drafts nothing
    until then."""

    def __init__(self, drafter: Drafter, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self.drafter = drafter
        self.stats = drafter.stats
        self.decides_length = drafter.decides_length
        self.calibration = drafter.calibration
        self.observed_top_k = drafter.observed_top_k
        self.begun = False
        self._prompt_ids = prompt_ids
        self._vocab_size = vocab_size
        self._missed: list[np.ndarray] = []  # the tokens that were emitted before it began

    @property
    def sources(self) -> Sequence[Drafter]:
        return self.drafter.sources

    def begin_if_ready(self) -> bool:
        """Begins once the kernels are ready. Returns true if the drafter has begun."""
        if not self.begun and drafting_kernels.ready(in_call=True):
            self.begun = True
            self.drafter.begin(self._prompt_ids, self._vocab_size)
            if self._missed:
                self.drafter.observe(Observation(np.concatenate(self._missed)))
        return self.begun

    def draft(self, budget: int, call: Call) -> DraftTree:
        return self.drafter.draft(budget, call) if self.begun else DraftTree.empty()

    def observe(self, observation: Observation) -> None:
        # A pass that ended before the kernels were ready has no top tokens: it begins at the next.
        is_complete = self.observed_top_k == 0 or observation.top_tokens is not None
        if self.begun or (is_complete and self.begin_if_ready()):
            self.drafter.observe(observation)
        else:
            self._missed.append(observation.tokens)

    def end(self) -> None:
        if self.begun:
            self.drafter.end()
        elif self._missed:
            drafting_kernels.ready()  # the next call shall find them


@contextmanager
def drafter_call(
    drafter: Drafter,
    prompts: Sequence[np.ndarray],
    vocab_size: int,
    processors: Sequence[Any] | None = None,
    memo: MutableMapping[Any, Any] | None = None,
) -> Iterator[list[Drafter]]:
    """One call of a drafter, from `begin` to `end`, with fresh `stats`. Yields the drafter of each
    row: this one and forks of it, or a [`LateDrafter`] for each.

    Args:
        drafter: Drafts for the first row.
        prompts: The prompt of each row, int64 of shape `(n,)`.
        vocab_size: The ids that the target model knows.
        processors: The logits processors of the call, where known.
        memo: The findings about the target model, which keep the table of `"auto"`.

    Raises:
        RuntimeError: If another call is using the drafter.
        ValueError: If it drafts ids outside of the vocabulary.
    """
    with owned(drafter), ExitStack() as ends:
        if memo is not None:
            share_table(drafter, memo, vocab_size)
        drafter.check(vocab_size, processors)
        drafters = [drafter, *(drafter.fork() for _ in prompts[1:])]
        rows: list[Drafter] = []
        for row_drafter, prompt_ids in zip(drafters, prompts, strict=True):
            row_drafter.stats = DraftStats()
            late = LateDrafter(row_drafter, prompt_ids, vocab_size)
            ends.callback(late.end)
            # The first token should not wait the half second that the cache takes.
            begins_now = drafting_kernels.compiled and late.begin_if_ready()
            rows.append(row_drafter if begins_now else late)
        yield rows
        for fork in drafters[1:]:
            drafter.stats += DraftStats(sources=fork.stats.sources)
        if drafter in drafter.sources:  # alone: the blend that it might be has counted its sources
            drafted, accepted = drafter.stats.drafted, drafter.stats.accepted
            alone = SourceStats(type(drafter).__name__, drafted, accepted, first=accepted)
            drafter.stats.sources = [alone]


def remember_outputs(
    stats: DraftStats, drafters: Sequence[Drafter], outputs: Sequence[Sequence[int]]
) -> None:
    """Before a call ends, lets `stats.copied` search the new tokens of each row: in `source_texts`
    of each source."""
    for row, (drafter, output) in enumerate(zip(drafters, outputs, strict=True)):
        texts = [text for source in drafter.sources for text in source.source_texts()]
        stats.outputs.append((row, output, texts))


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
