"""Whether a datastore pays for a model: the same prompts with and without it, in turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...drafting.datastore_drafts import DatastoreDrafts
from ...drafting.stats import SpeculationStats
from ...generation.warmup import warmup
from ...hook import install
from ...store.datastore import Datastore
from ..bench.measure import Bench, ContextTooShortError
from ..bench.methods import PLAIN, Method, default_drafter
from ..bench.summary import Entry, Key, Sample, Summary, summaries

DEFAULT, WITH_STORE = "default drafter", "with the datastore"
FEWEST_PROMPTS = 5  # with fewer their spread is unknown
LEAST_GAIN = 1.02  # for which a datastore is worth its disk space


@dataclass(frozen=True)
class Gain:
    """The tokens per second with a datastore over those of the default drafter, of all prompts
    together, with the bounds of 90 % of the ratios of prompts resampled from these."""

    prompts: int
    ratio: float
    low: float
    high: float

    @classmethod
    def of(cls, entries: list[Entry]) -> Gain:
        figures = np.array([_figures(entry) for entry in entries])  # (prompts, 2 methods, 2)
        draws = np.random.default_rng(0).integers(len(figures), size=(2000, len(figures)))
        low, high = np.percentile([_ratio(figures[draw]) for draw in draws], (5, 95))
        return cls(len(figures), _ratio(figures), float(low), float(high))

    def __str__(self) -> str:
        """The verdict."""
        figures = f"{self.ratio:.2f}x over the default drafter"
        spread = f"{self.low:.2f}x to {self.high:.2f}x"
        if self.prompts < FEWEST_PROMPTS:
            return (
                f"too few prompts to say: {figures}, of {self.prompts}; give at least "
                f"{FEWEST_PROMPTS}"
            )
        if self.low > 1 and self.ratio >= LEAST_GAIN:
            return f"pays: {figures} ({spread})"
        if self.high < LEAST_GAIN:
            return f"does not pay here: {figures} ({spread})"
        return (
            f"too few prompts to say: {figures}, but it can be {spread} (the spread is larger than "
            "the difference)"
        )


def _figures(entry: Entry) -> list[tuple[int, float]]:
    """Tokens and seconds of a prompt, with the default drafter and with the datastore."""
    samples: dict[str, Sample] = {sample["method"]: sample for sample in entry["samples"]}
    return [
        (each["tokens"], each["prefill_seconds"] + each["decoding_seconds"])
        for each in (samples[DEFAULT], samples[WITH_STORE])
    ]


def _ratio(figures: np.ndarray) -> float:
    (tokens, seconds), (tokens_with, seconds_with) = figures.sum(axis=0)
    return float(tokens_with / seconds_with / (tokens / seconds))


@dataclass(frozen=True)
class Evaluation:
    """What was measured: a summary of plain decoding, the default drafter, and this with the
    datastore; the statistics of those that draft, by name; and why prompts were left out."""

    summaries: dict[Key, Summary]
    stats: dict[str, SpeculationStats]
    gain: Gain
    skipped: list[str]


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    store: Datastore,
    prompts: Mapping[str, list[int]],
    max_new_tokens: int,
) -> Evaluation:
    """Continues prompts, ids by name, plainly, with the default drafter, and with the store too."""

    def new_methods() -> list[Method]:
        return [
            Method(PLAIN),
            Method(DEFAULT, "auto", default_drafter()),
            Method(WITH_STORE, "auto", default_drafter() | DatastoreDrafts(store)),
        ]

    install()
    warmup()
    bench = Bench(model, tokenizer, new_methods, replay=False, max_new_tokens=max_new_tokens)
    bench.warm_up()
    bench.begin()
    entries, skipped = [], []
    stats = {method.name: SpeculationStats() for method in bench.methods if method.drafter}
    for name, ids in tqdm(prompts.items(), "measuring", leave=False, disable=None):
        try:
            entry, _ = bench.measure(name, [ids])
        except ContextTooShortError as error:
            skipped.append(str(error))
            continue
        entries.append(entry)
        for method in bench.methods:
            if method.drafter is not None:
                stats[method.name] += method.drafter.stats
    if not entries:
        raise ValueError(f"no prompt fits into the model's context: {skipped[0]}")
    return Evaluation(summaries(entries), stats, Gain.of(entries), skipped)
