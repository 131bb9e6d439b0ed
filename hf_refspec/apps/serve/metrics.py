"""What the server has done so far, in Prometheus form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ...drafting.stats import SpeculationStats
from .generation import Generation

# Up to which waiting times are counted.
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counts of one server, in a registry of its own. `sources` are the names of what drafts, the
    two functions count requests when they are read."""

    def __init__(
        self, sources: Sequence[str], waiting: Callable[[], int], running: Callable[[], int]
    ) -> None:
        self._stats = SpeculationStats()
        self._registry = CollectorRegistry()
        counter = partial(Counter, namespace="hf_refspec", registry=self._registry)
        gauge = partial(Gauge, namespace="hf_refspec", registry=self._registry)
        self._requests = counter("requests", "Requests by how they ended", ["outcome"])
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts that were read")
        self._tokens = counter("generated_tokens", "New tokens")
        self._passes = counter(
            "forward_passes", "Forward passes of the model, counted for each row in them"
        )
        text = "Accepted draft tokens by the source that drafted them, each counted once"
        self._accepted = counter("accepted_draft_tokens", text, ["source"])
        gauge("waiting_requests", "Requests that wait").set_function(waiting)
        gauge("running_requests", "Requests that are decoded, rows").set_function(running)
        histogram = partial(Histogram, namespace="hf_refspec", registry=self._registry)
        histogram = partial(histogram, buckets=_SECONDS)
        self._waited = histogram("waiting_seconds", "From a request to its first forward pass")
        self._first = histogram("time_to_first_token_seconds", "From a request to its first token")
        gauge("mat", "New tokens per forward pass").set_function(lambda: self._stats.mat)
        text = "Accepted draft tokens of a source per forward pass; 1 and their sum is MAT"
        per_pass = gauge("mat_of_source", text, ["source"])
        for index, source in enumerate(sources):
            self._accepted.labels(source)  # present from the start, with 0
            per_pass.labels(source).set_function(partial(self._per_pass, index))

    def count_refused(self) -> None:
        """Counts a request that was refused: it was wrong, or too many waited."""
        self._requests.labels("refused").inc()

    def record(self, generation: Generation) -> None:
        stats = generation.stats
        self._requests.labels(generation.outcome).inc()
        if generation.began_at is not None:
            self._waited.observe(generation.began_at - generation.submitted_at)
        if generation.first_token_at is not None:
            self._first.observe(generation.first_token_at - generation.submitted_at)
        if not stats.forward_passes:  # it only waited, and this is not the engine's thread
            return
        self._prompt_tokens.inc(generation.prompt_tokens)
        self._tokens.inc(stats.tokens)
        self._passes.inc(stats.forward_passes)
        for source in stats.sources:
            self._accepted.labels(source.name).inc(source.first)
        self._stats += stats

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _per_pass(self, index: int) -> float:
        sources = self._stats.sources
        return sources[index].first / self._stats.forward_passes if sources else 0.0
