"""A thread that decodes several requests together, up to a number of rows; others wait in order."""

import copy
import gc
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from threading import Condition, Thread
from time import monotonic
from typing import Any

import numpy as np
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from ...drafting.blend import Blend
from ...drafting.calls import DrafterPool
from ...drafting.contract import NO_PATH, Call, Drafter, Observation, PathDrafter
from ...drafting.reference_copy import ReferenceCopy
from ...drafting.stats import DraftStats
from ...drafting.tree import DraftTree
from ...generation.running_batch import RunningBatch
from ...generation.running_text import RunningText
from ...messages import counted
from ..shared.prompts import text_inputs
from .grammars import GrammarBudget
from .protocol import ApiError, shutting_down
from .served_row import Piece, PreparedRequest, ServedRow

logger = logging.getLogger(__name__)

# Bounds of the waiting times in the histograms.
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class RequestEngine:
    """Decodes requests in a thread of its own: `max_rows` together, each for up to `max_seconds`.

    Meanwhile `max_waiting` others may wait. Unless it `isolates` requests, the `sources` learn from
    one for the next, and common beginnings of prompts are read once. Answers have annotations if
    there are `source_names`, the operator's names of datastores by their paths."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sources: Sequence[Drafter],
        max_seconds: float,
        max_waiting: int,
        isolates: bool = False,
        max_rows: int | None = None,
        source_names: Mapping[str, str] | None = None,
    ) -> None:
        self.source_names = source_names
        self._model = model
        self._tokenizer = tokenizer
        self._drafter = Blend([Prediction(), Grammar(), *sources])
        self._pool = DrafterPool(self._drafter)
        self._isolates = isolates
        self._max_seconds = max_seconds
        self._max_waiting = max_waiting
        end = model.generation_config.eos_token_id
        self._end_tokens = {*end} if isinstance(end, list) else {end}
        sharing = {"prefix_tokens": 0} if isolates else {}
        self._batch = RunningBatch(model, max_rows=max_rows, **sharing)
        self._texts: dict[RunningText, ServedRow] = {}
        self._waiting: deque[ServedRow] = deque()
        self._running: list[ServedRow] = []
        self._closed = False
        self._changed = Condition()  # of the three above
        self._last_seconds = 1.0
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        names = [type(drafter).__name__ for drafter in self._drafter.sources]
        self.metrics = Metrics(names, lambda: self.waiting, lambda: self.running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def start(self) -> None:
        """Probes the model before any request, and starts the thread."""
        inputs = text_inputs(self._tokenizer, "a b").to(self._model.device)
        text = self._batch.add(**inputs, max_new_tokens=4, candidate_generator=ReferenceCopy())
        while not text.finished:
            self._batch.step()
        torch.seed()  # otherwise each start of the server would sample the same texts
        # A garbage collection over everything that is loaded would stop all threads for 200 ms.
        gc.collect()
        gc.freeze()
        self._thread.start()

    def submit(
        self, prompts: Sequence[PreparedRequest], listener: Callable[[int, Piece | None], None]
    ) -> list[ServedRow]:
        """Queues the rows of a request's prompts, or raises an `ApiError`.

        `listener` receives each one's index and pieces."""
        indices = count()
        rows = [
            ServedRow(prompt, row, self._tokenizer, partial(listener, next(indices)))
            for prompt in prompts
            for row in range(prompt.rows)
        ]
        with self._changed:
            if self._closed:
                raise shutting_down()
            room = self._max_waiting + self._batch.max_rows
            if len(rows) > room:
                param = "n" if len(prompts) == 1 else "prompt"
                raise ApiError(400, f"{param}: this server takes {room} at most", param)
            if self.waiting + self.running + len(rows) > room:
                wait = {"Retry-After": str(math.ceil(self._last_seconds))}
                message = f"the queue is full, {self.waiting} waiting; try again later"
                raise ApiError(429, message, None, "rate_limit_exceeded", wait)
            self._waiting.extend(rows)
            self._changed.notify()
        return rows

    def cancel(self, row: ServedRow) -> None:
        """Ends a row in the queue, in its prefill or after its next token."""
        row.cancel()
        with self._changed:
            if row not in self._waiting:
                return
            self._waiting.remove(row)
        self._end(row)

    def cancel_all(self) -> None:
        """Takes no more requests, and cancels the present ones."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            left = [*self._waiting, *self._running]
        for row in left:
            self.cancel(row)

    def close(self, seconds: float) -> None:
        """Cancels all requests, and waits up to `seconds` for the running forward pass."""
        self.cancel_all()
        self._thread.join(seconds)

    def _run(self) -> None:
        while self._admit():
            try:
                ended = self._batch.step()
            except Exception:  # of the model or a device: later requests may succeed
                logger.exception("A forward pass failed.")
                ended = [text for text in self._texts if text.finished]
                for text in ended:
                    if not text.complete and self._texts[text].outcome is None:
                        self._texts[text].stop()
            for text in ended:
                self._finish(text)

    def _admit(self) -> bool:
        """Waits for requests, and begins them; returns True if anything is left to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._running or self._closed)
            admitted: list[ServedRow] = []
            while self._waiting and self.running + len(admitted) < self._batch.max_rows:
                admitted.append(self._waiting.popleft())
            self._running += admitted
        for row in admitted:
            try:
                self._begin(row)
            except Exception:
                logger.exception("A request failed.")
                row.stop()
                self._remove(row)
        return bool(self._running or self._waiting or not self._closed)

    def _begin(self, row: ServedRow) -> None:
        request = row.request
        if self._isolates:
            drafter: Any = copy.deepcopy(self._drafter)
        else:
            drafter = row.session.enter_context(self._pool.drafter())
        prediction, grammar, *_ = drafter.sources
        if request.prediction is not None:
            prediction.lend(ReferenceCopy(request.prediction, include_prompt=False))
        if request.grammar is not None:
            grammar_drafts = copy.deepcopy(request.grammar)
            grammar_drafts.stops = request.grammar_budget.ends_drafts
            grammar.lend(grammar_drafts, request.grammar_budget)
        text = self._batch.add(
            **request.inputs.to(self._model.device),
            **request.options,
            seed=row.seed,
            interrupted=row.is_interrupted,
            num_return_sequences=1,
            logits_processor=row.processors(),
            stopping_criteria=StoppingCriteriaList([row]),
            candidate_generator=drafter,
        )
        self._texts[text] = row
        row.begin(self._max_seconds)

    def _finish(self, text: RunningText) -> None:
        row = self._texts.pop(text)
        try:
            row.end(text.stats, self._end_tokens)
        except Exception:  # the thread goes on with the others
            logger.exception("The end of a request failed.")
            row.stop()
        self._remove(row)

    def _remove(self, row: ServedRow) -> None:
        row.session.close()
        self._last_seconds = monotonic() - row.submitted_at
        with self._changed:
            self._running.remove(row)
        self._end(row)
        prompt_tokens = counted(row.prompt_tokens, "token")
        counts = f"{prompt_tokens} of prompt, {row.tokens:,} of answer"
        if row.request.prediction is not None:
            counts += f", {row.accepted_prediction_tokens} accepted from the prediction"
        speed = f"{self._last_seconds:.2f} s, {row.stats.mat:.2f} tokens per forward pass"
        waiting = f"{counted(self.waiting, 'request')} waiting"
        logger.info("%s: %s, %s; %s", row.outcome, counts, speed, waiting)

    def _end(self, row: ServedRow) -> None:
        self.metrics.record(row)
        row.listener(None)


class Metrics:
    """The server's counts for Prometheus; the functions return the present number of requests."""

    def __init__(
        self, sources: Sequence[str], waiting: Callable[[], int], running: Callable[[], int]
    ) -> None:
        self._stats = DraftStats()
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="hf_refspec", registry=self.registry)
        gauge = partial(Gauge, namespace="hf_refspec", registry=self.registry)
        histogram = partial(
            Histogram, namespace="hf_refspec", registry=self.registry, buckets=_SECONDS
        )
        self._requests = counter("requests", "Requests by how they ended", ["outcome"])
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts that were read")
        self._tokens = counter("generated_tokens", "New tokens")
        self._passes = counter("forward_passes", "Forward passes, counted for each row in them")
        text = "Accepted draft tokens by the source that drafted them, each counted once"
        self._accepted = counter("accepted_draft_tokens", text, ["source"])
        gauge("waiting_requests", "Requests that wait").set_function(waiting)
        gauge("running_requests", "Requests that are decoded, rows").set_function(running)
        self._waited = histogram("waiting_seconds", "From a request to its first forward pass")
        self._first = histogram("time_to_first_token_seconds", "From a request to its first token")
        gauge("mat", "New tokens per forward pass").set_function(lambda: self._stats.mat)
        for source in sources:
            self._accepted.labels(source)  # present from the start, with 0

    def count_refused(self) -> None:
        self._requests.labels("refused").inc()

    def record(self, row: ServedRow) -> None:
        stats = row.stats
        self._requests.labels(row.outcome).inc()
        if row.began_at is not None:
            self._waited.observe(row.began_at - row.submitted_at)
        if row.first_token_at is not None:
            self._first.observe(row.first_token_at - row.submitted_at)
        if not stats.forward_passes:  # it only waited, and this is another thread than the engine's
            return
        self._prompt_tokens.inc(row.prompt_tokens)
        self._tokens.inc(stats.tokens)
        self._passes.inc(stats.forward_passes)
        for source in stats.sources:
            self._accepted.labels(source.name).inc(source.first)
        self._stats += stats


class RequestSource(PathDrafter):
    """Drafts and prunes by a source lent for one request, while its budget of time lasts.

    By default it drafts nothing. It serves one request after another, so that a blend keeps its
    corrections of the estimates."""

    def __init__(self) -> None:
        self.lend(PathDrafter())

    def lend(self, source: PathDrafter, budget: GrammarBudget | None = None) -> None:
        """Drafts by `source` until the request ends."""
        self._source = source
        self._budget = budget
        self.prunes = source.prunes

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._source.begin(prompt_ids, vocab_size)

    def continue_path(self, path: np.ndarray, budget: int, call: Call) -> DraftTree:
        continue_path = self._source.continue_path
        return self._within_budget(DraftTree.empty(), continue_path, path, budget, call)

    def prune(self, tree: DraftTree, path: np.ndarray = NO_PATH) -> DraftTree:
        return self._within_budget(tree, self._source.prune, tree, path)

    def observe(self, observation: Observation) -> None:
        self._within_budget(None, self._source.observe, observation)

    def end(self) -> None:
        self._source.end()
        self.lend(PathDrafter())

    def _within_budget(self, otherwise: Any, method: Callable[..., Any], *arguments: Any) -> Any:
        if self._budget is None:
            return method(*arguments)
        if self._budget.ends_drafts():
            return otherwise
        with self._budget:
            return method(*arguments)


class Prediction(RequestSource):
    """Copies of the answer that the client expects."""


class Grammar(RequestSource):
    """Tokens that the request's grammar allows."""
