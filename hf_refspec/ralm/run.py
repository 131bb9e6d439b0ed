"""Calls that retrieve while they generate: what `iterative_ralm` and `knn_lm` have in common."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation import BaseStreamer

from ..foreign_code import foreign_code
from ..generation.row import Row
from ..kernels.compilation import usable_cores
from ..refusals import check_prepared
from ..retrieval.retriever import Retriever
from ..retrieval.vector_index import LEAST_WALKED
from .algorithm import MOST_CACHED, NO_IDS, RaLMSeq, RaLMSpec, Text
from .checked_search import CheckedRetriever, RalmError
from .options import RalmSpeculation
from .os3 import Scheduler, StrideScheduler, WaitingScheduler
from .stats import RalmStats

logger = logging.getLogger("hf_refspec")

# The part of a search and of a step that scoring the ids of earlier requests may take.
EARLIER_COST = 0.05
# The entry of a retriever's `__dict__` that keeps what was learned of it.
LEARNED = "_learned_by_speculation"


def generate_with_retrieval(
    text: Text,
    retriever: Retriever,
    speculation: RalmSpeculation | None,
    k: int,
    neighbours: Callable[[np.ndarray], np.ndarray] | None = None,
    stats: RalmStats | None = None,
    model_threads: int = 1,
) -> RalmStats:
    """Generates until the text is finished and every step of it is verified.

    A `RalmError` leaves the text with its verified steps alone. The retriever keeps what was
    learned of it for the next call.

    Args:
        text ([`Text`]): The text that is generated.
        retriever ([`Retriever`]): Searched in another thread.
        speculation ([`RalmSpeculation`], *optional*): `None` for the baseline, RaLMSeq.
        k (`int`): How many passages a step needs.
        neighbours (callable, *optional*): Maps the ids that a search found (int64 of shape `(n,)`)
            to further ones for the request cache (spatial locality; section 5.3).
        stats ([`RalmStats`], *optional*): It is cleared, filled and returned.
        model_threads (`int`, *optional*, defaults to 1): The threads that a step keeps busy.
    """
    stats = RalmStats() if stats is None else stats
    stats.clear()
    with closing(CheckedRetriever(retriever, k)) as checked:
        if speculation is None:
            RaLMSeq(text, checked, k, stats).run()
            return stats
        _check_prefetch(retriever, speculation, k)
        keeps = speculation.max_gamma is None and hasattr(retriever, "__dict__")
        learned = vars(retriever).setdefault(LEARNED, Learned()) if keeps else Learned()
        setting = (k, *astuple(speculation))
        known, earlier = learned.get(setting, (None, NO_IDS))
        scheduler: Scheduler
        if known is not None:
            scheduler = deepcopy(known)
        elif speculation.max_gamma is None:
            exact = getattr(retriever, "index", None) == "flat"
            scheduler = WaitingScheduler(speculation.asynchronous, exact)
        else:
            scheduler = StrideScheduler(speculation.max_gamma, speculation.asynchronous)
        # A search and a step slow each other down if there are too few cores.
        search_threads = getattr(retriever, "search_threads", 0)
        busy = search_threads + model_threads if search_threads else 1  # or it searches elsewhere
        contention = max(busy / usable_cores(), 1.0)
        request = RaLMSpec(
            text, checked, k, stats, speculation, scheduler, neighbours, contention, earlier
        )
        request.run()
        stats.contention = scheduler.measured.contention
        learned.keep(setting, scheduler, request.cache.newest_first, earlier)
    return stats


class Learned(dict[tuple, tuple[Scheduler, np.ndarray]]):
    """Schedulers and retrieved ids (the newest first) of a retriever's calls, by setting.

    An entry is replaced, never changed, so that threads can share it."""

    def __reduce__(self) -> tuple[type[Learned], tuple]:
        return Learned, ()  # a copy of the retriever has learned nothing

    def keep(
        self, setting: tuple, scheduler: Scheduler, retrieved: np.ndarray, earlier: np.ndarray
    ) -> None:
        """Keeps the scheduler of a request, and the ids that it `retrieved` (int64, `(m,)`).

        It began with the ids `earlier` (int64, `(n,)`); requests that have ended meanwhile have
        added theirs."""
        _, now = self.get(setting, (None, NO_IDS))
        others = now[~(np.isin(now, earlier) | np.isin(now, retrieved))]
        measured = scheduler.measured
        seconds = EARLIER_COST * min(measured.search(1), measured.step)
        scored_in_time = int(len(retrieved) * seconds / max(measured.guess, 1e-9))
        limit = min(MOST_CACHED, scored_in_time)
        self[setting] = scheduler, np.concatenate([retrieved, others])[:limit]


def _check_prefetch(retriever: Any, speculation: RalmSpeculation, k: int) -> None:
    """Refuses more passages than a graph walks: walking further may find a better best one."""
    walked = max(k, getattr(retriever, "ef_search", LEAST_WALKED))
    if str(getattr(retriever, "index", None)) == "hnsw" and speculation.prefetch > walked:
        raise ValueError(
            f'prefetch must be at most {walked} with index="hnsw" and k={k}, but is '
            f"{speculation.prefetch}; or give the retriever a larger ef_search"
        )


def checked_speculation(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    speculation: str | RalmSpeculation | None,
    caller: str,
) -> RalmSpeculation | None:
    """Refuses calls that `caller` cannot serve; returns the call's speculation.

    It is `None`, with a warning, for a model that runs code of others, which steps that are undone
    and repeated would run too often."""
    check_prepared(model, input_ids, generation_config, model_kwargs, caller)
    if len(input_ids) != 1:
        rows = f"`input_ids` has {len(input_ids)} rows"
        raise ValueError(f"`{caller}` continues one text, but {rows}. Pass one prompt at a time.")
    parsed = RalmSpeculation.parse(speculation)
    stateful = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
    for processor in logits_processor:
        if parsed is not None and isinstance(processor, stateful):
            raise ValueError(
                f"`speculation` cannot be combined with a {type(processor).__name__}: it remembers "
                "tokens that are rolled back. Pass `speculation=None`."
            )
    if parsed is not None and (code := foreign_code(model)) is not None:
        name = type(model).__name__
        logger.warning("%s retrieves without speculation, with the same text: %s.", name, code)
        return None
    return parsed


@dataclass
class RowText(Text):
    """A text in a row, whose verified tokens are streamed.

    Each step has the row's mark `before` it and its `end`, the length of the row after it."""

    row: Row
    streamer: BaseStreamer | None

    def generate(
        self,
        retriever: Retriever,
        speculation: RalmSpeculation | None,
        k: int,
        stats: RalmStats | None,
        neighbours: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        """As `generate_with_retrieval`; a `RalmError` carries the verified part of the row."""
        ids = self.row.ids
        if self.streamer is not None:
            self.streamer.put(ids.cpu())
        threads = torch.get_num_threads() if ids.device.type == "cpu" else 1
        try:
            generate_with_retrieval(self, retriever, speculation, k, neighbours, stats, threads)
        except RalmError as error:
            error.text_ids = self.row.ids[0].tolist()
            raise
        if self.streamer is not None:
            self.streamer.end()

    @property
    def finished(self) -> bool:
        """True if the last step has ended the text."""
        return self.row.stopped_at is not None

    def commit(self, steps: Sequence[Any]) -> None:
        """Streams verified steps."""
        if self.streamer is not None and steps:
            for token in self.row.ids[0, steps[0].before.length : steps[-1].end].cpu():
                self.streamer.put(token[None])
