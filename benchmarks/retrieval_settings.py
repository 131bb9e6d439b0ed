"""Speculative retrieval measured against waiting for every search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any, TypeAlias

from hf_refspec.apps.bench.measure import Bench
from hf_refspec.apps.bench.methods import Method, transformers_methods
from hf_refspec.apps.bench.registry import Job
from hf_refspec.apps.bench.summary import Entry
from hf_refspec.ralm.knn_lm import knn_lm
from hf_refspec.ralm.options import Speculation
from hf_refspec.ralm.stats import RetrievalStats

Prompt: TypeAlias = "tuple[str, list[int], list[int] | None]"  # name, prompt ids, recorded answer
# Retrieval that waits for every search, RaLMSpec with its three boosters, and ours.
BASELINE, PUBLISHED, OURS = "baseline", "as published, psa", "ours, psa"
LARGE_PREFETCH = 256


def speculations(ablate: bool) -> dict[str, Speculation | None]:
    """The settings of speculative retrieval, by name.

    With `ablate` also RaLMSpec without some of its boosters and with more prefetching (arXiv
    2401.14021, Tables 1, 2 and 4), and both with fixed strides instead of OS3.
    """
    main = {BASELINE: None, PUBLISHED: Speculation.published("psa"), OURS: Speculation()}
    if not ablate:
        return main
    letters = ("", "p", "s", "a", "ps", "pa", "sa")
    strides = range(1, 9)
    return {
        **main,
        **{f"as published, {each or 'none'}": Speculation.published(each) for each in letters},
        **{
            f"as published, {each}, prefetch {LARGE_PREFETCH}": replace(
                Speculation.published(each), prefetch=LARGE_PREFETCH
            )
            for each in ("p", "psa")
        },
        **published_strides("p", strides),
        "ours, ps": Speculation(asynchronous=False),
        **{f"ours, stride {each}": Speculation(stride=each) for each in strides},
    }


def published_strides(letters: str, strides: Iterable[int]) -> dict[str, Speculation]:
    """RaLMSpec with fixed strides, by name."""
    published = Speculation.published(letters)
    return {
        f"as published, {letters or 'none'}, stride {each}": replace(published, stride=each)
        for each in strides
    }


def retrieving_methods(settings: dict[str, Speculation | None], **options: Any) -> list[Method]:
    """A method for each setting of speculation, with further keyword arguments of `generate`."""
    return [
        Method(name, options={**options, "speculation": speculation}, retrieves=True)
        for name, speculation in settings.items()
    ]


class RetrievalBench(Bench):
    """A [`Bench`] that also records searches, and compares the passages that were retrieved.

    The seconds of a call are those of generation (G) and of retrieval (R), as in the paper's Figure
    4: queries, the request cache, and waiting for searches.
    """

    def call(self, method: Method, *args: Any, **kwargs: Any) -> Any:
        if not method.retrieves:
            return super().call(method, *args, **kwargs)
        stats = RetrievalStats()
        sample, rows, outputs = super().call(method, *args, **kwargs, retrieval_stats=stats)
        seconds = sample["prefill_seconds"] + sample["decoding_seconds"]
        retrieval = stats.waiting_seconds + stats.cache_seconds
        if method.kwargs["custom_generate"] is not knn_lm:  # whose queries generation computes
            retrieval += stats.query_seconds
        figures = {"searches": stats.searches, "G, s": seconds - retrieval, "R, s": retrieval}
        if stats.strides:
            figures |= {"gamma": stats.gamma, "mean stride": fmean(stats.strides)}
        sample["figures"] = figures
        return sample, rows, [replace(each, passages=stats.best_ids) for each in outputs]


@dataclass
class Setting:
    """A retriever, or a datastore with its options."""

    name: str
    size: int  # passages or entries that are searched
    # The methods that retrieve, the baseline first; called once, as building an index takes time.
    new_methods: Callable[[], list[Method]]
    longest_passage: int = 0  # tokens that are put before a prompt, at most
    sampled: bool = False
    methods: list[Method] = field(default_factory=list)


def suites_of(
    name: str, settings: list[Setting], prompts: list[Prompt], methods: list[str] | None
) -> dict[str, list[Job]]:
    """A suite for each setting, of all prompts, by the baseline and the methods that are named, or
    by all."""
    return {
        f"{name}, {setting.name}, {setting.size:,} to search": [
            partial(_measure, setting, methods, *prompt) for prompt in prompts
        ]
        for setting in settings
    }


def _measure(
    setting: Setting,
    names: list[str] | None,
    name: str,
    prompt_ids: list[int],
    answer_ids: list[int] | None,
    bench: Bench,
) -> Iterator[Entry]:
    """Measures one prompt with one setting, and the model without retrieval beside it."""
    bench.check_context(name, prompt_ids, bench.new_tokens(answer_ids) + setting.longest_passage)
    if not setting.methods:
        methods = [*setting.new_methods(), *bench.supported(transformers_methods())]
        if unknown := {*(names or ())} - {method.name for method in methods}:
            known = ", ".join(method.name for method in methods)
            raise ValueError(f"--methods has {unknown.pop()!r}, but there are only: {known}")
        setting.methods = [each for each in methods if not names or each.name in (BASELINE, *names)]
        for method in setting.methods:  # first calls compile, probe and load
            bench.call(method, [prompt_ids], answer_ids)
    yield bench.measure(name, [prompt_ids], answer_ids, setting.methods, do_sample=setting.sampled)[
        0
    ]
