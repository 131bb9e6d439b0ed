"""What the server has done so far, in Prometheus form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from ...drafting.stats import SpeculationStats
from .generation import Generation


class Metrics:
    """Counts of one server, in a registry of its own; `sources` are the names of what drafts."""

    def __init__(self, sources: Sequence[str]) -> None:
        self._stats = SpeculationStats()
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests by how they ended", "outcome")
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that were read")
        self._tokens = self._counter("generated_tokens", "New tokens")
        self._passes = self._counter("forward_passes", "Forward passes of the model")
        text = "Accepted draft tokens by the source that drafted them, each counted once"
        self._accepted = self._counter("accepted_draft_tokens", text, "source")
        self.gauge("mat", "New tokens per forward pass", lambda: self._stats.mat)
        text = "Accepted draft tokens of a source per forward pass; 1 and their sum is MAT"
        per_pass = Gauge("hf_refspec_mat_of_source", text, ["source"], registry=self._registry)
        for index, source in enumerate(sources):
            self._accepted.labels(source)  # present from the start, with 0
            per_pass.labels(source).set_function(partial(self._per_pass, index))

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Adds a number that is computed when it is read."""
        Gauge(f"hf_refspec_{name}", text, registry=self._registry).set_function(value)

    def count_refused(self) -> None:
        """Counts a request that was refused: it was wrong, or too many waited."""
        self._requests.labels("refused").inc()

    def record(self, generation: Generation) -> None:
        """Adds a request that has ended."""
        stats = generation.stats
        self._requests.labels(generation.outcome).inc()
        if not stats.forward_passes:  # it only waited, and this is not the engine's thread
            return
        self._prompt_tokens.inc(generation.prompt_tokens)
        self._tokens.inc(stats.tokens)
        self._passes.inc(stats.forward_passes)
        for source in stats.sources:
            self._accepted.labels(source.name).inc(source.first)
        self._stats += stats

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"hf_refspec_{name}", text, labels, registry=self._registry)

    def _per_pass(self, index: int) -> float:
        sources = self._stats.sources
        return sources[index].first / self._stats.forward_passes if sources else 0.0
