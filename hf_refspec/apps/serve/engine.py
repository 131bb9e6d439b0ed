"""The thread that decodes: one request after another, in the order in which they came."""

from __future__ import annotations

import copy
import gc
import logging
import math
from collections import deque
from collections.abc import Sequence
from threading import Condition, Thread
from time import perf_counter

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from ...drafting.blend import Blend
from ...drafting.drafter import Drafter
from ...drafting.reference_copy import ReferenceCopy
from ..shared.prompts import text_inputs
from .errors import shutting_down, too_many
from .generation import Generation, GenerationRequest, Listener
from .metrics import Metrics
from .prediction import Prediction

logger = logging.getLogger(__name__)


class Engine:
    """Decodes requests in a thread of its own, each for `max_seconds` at most, while `max_waiting`
    others may wait. What the `sources` learn in one request serves the next ones, unless `isolates`
    is set, so that no client can tell by the speed what others asked."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sources: Sequence[Drafter],
        max_seconds: float,
        max_waiting: int,
        isolates: bool = False,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._drafter = Blend([Prediction(), *sources])
        self._isolates = isolates
        self._max_seconds = max_seconds
        self._max_waiting = max_waiting
        end = model.generation_config.eos_token_id
        self._end_tokens = {*end} if isinstance(end, list) else {end}
        self._waiting: deque[Generation] = deque()
        self._running: Generation | None = None
        self._closed = False
        self._changed = Condition()  # of the three above
        self._last_seconds = 1.0
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        names = [type(each).__name__ for each in self._drafter.drafters]
        self.metrics = Metrics(names, lambda: self.waiting, lambda: self.running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        """How many requests are decoded: one or none."""
        return int(self._running is not None)

    def start(self) -> None:
        """Probes the model, so that no request waits for it, and starts the thread."""
        inputs = text_inputs(self._tokenizer, "a b").to(self._model.device)
        self._model.generate(**inputs, max_new_tokens=4, candidate_generator=ReferenceCopy())
        # Collecting garbage among all that is loaded would stop every thread for 200 ms.
        gc.collect()
        gc.freeze()
        self._thread.start()

    def submit(self, request: GenerationRequest, listener: Listener) -> Generation:
        """Puts a request at the end of the queue; raises an `ApiError` if the queue is full, or
        after [`~Engine.drain`]."""
        generation = Generation(request, self._tokenizer, listener)
        with self._changed:
            if self._closed:
                raise shutting_down()
            if self.waiting >= self._max_waiting + 1 - self.running:
                seconds = math.ceil(self._last_seconds)
                raise too_many(f"the queue is full, {self.waiting} waiting", seconds)
            self._waiting.append(generation)
            self._changed.notify()
        return generation

    def cancel(self, generation: Generation) -> None:
        """Ends a request in the queue, in its prefill or after its next token; does nothing if it
        has ended."""
        generation.cancelled = True
        with self._changed:
            if generation not in self._waiting:
                return
            self._waiting.remove(generation)
        generation.outcome = "cancelled"
        self._end(generation)

    def drain(self) -> None:
        """Takes no more requests; those that wait are still decoded."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def cancel_all(self) -> None:
        with self._changed:
            left = [*self._waiting, *([self._running] if self._running else [])]
        for generation in left:
            self.cancel(generation)

    def close(self, seconds: float) -> None:
        """Cancels all requests and ends the thread, waiting so many seconds at most for the forward
        pass that it is in."""
        self.drain()
        self.cancel_all()
        self._thread.join(seconds)

    def _run(self) -> None:
        while (generation := self._next()) is not None:
            began = perf_counter()
            try:
                self._generate(generation)
            except Exception:  # of the model, or a device: the next request may go well
                logger.exception("A request failed.")
                generation.outcome = "error"
            self._last_seconds = perf_counter() - began
            with self._changed:
                self._running = None
            self._end(generation)
            logger.info("%s; %d waiting", self._described(generation), self.waiting)

    def _next(self) -> Generation | None:
        """Waits for the next request; `None` once there are no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._running = self._waiting.popleft() if self._waiting else None
            return self._running

    def _generate(self, generation: Generation) -> None:
        request = generation.request
        drafter = copy.deepcopy(self._drafter) if self._isolates else self._drafter
        drafter.drafters[0].ids = request.prediction
        drafter.stats = generation.stats  # in case the call fails before the drafters begin
        # A request without a seed must not go on with the random numbers of one that has one.
        if request.seed is None:
            torch.seed()
        else:
            torch.manual_seed(request.seed)
        try:
            with generation.begun(self._max_seconds):
                self._model.generate(
                    **request.inputs.to(self._model.device),
                    **request.options,
                    num_return_sequences=1,
                    stopping_criteria=StoppingCriteriaList([generation]),
                    candidate_generator=drafter,
                )
        finally:
            generation.stats = drafter.stats
        generation.end(self._end_tokens)

    def _end(self, generation: Generation) -> None:
        self.metrics.record(generation)
        generation.listener(None)

    def _described(self, generation: Generation) -> str:
        line = f"{generation.outcome}: {generation.prompt_tokens} + {generation.tokens} tokens"
        if generation.request.prediction is not None:
            line += f", {generation.accepted_prediction_tokens} of the prediction"
        return f"{line}, {self._last_seconds:.2f} s, MAT {generation.stats.mat:.2f}"
