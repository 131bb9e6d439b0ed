"""Speculative retrieval (arXiv 2401.14021) against the same model waiting for every search."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .measure import Bench
from .methods import (
    Method,
    ablations,
    main_speculations,
    retrieving_methods,
    strides,
    transformers_methods,
)


class Searched(ABC):
    """What is searched: several indexes, or one with several settings.

    Attributes:
        settings (`list[str]`): The names of all of them.
        longest_passage (`int`): The most tokens that are put before a prompt.
    """

    settings: list[str]
    longest_passage = 0

    @abstractmethod
    def size(self, setting: str) -> int:
        """How many there are to search."""

    @abstractmethod
    def options(self, setting: str, bench: Bench) -> dict[str, Any]:
        """The keyword arguments of a `generate` that retrieves."""

    def samples(self, setting: str) -> bool:
        """Whether the model samples; it does not where ablations are measured."""
        return False

    def methods(self, setting: str, bench: Bench) -> list[Method]:
        """The main methods to retrieve, the baseline first."""
        return retrieving_methods(main_speculations(), **self.options(setting, bench))

    def ablations(self, setting: str, bench: Bench) -> list[Method]:
        """Without some of the boosters, and with fixed strides."""
        return retrieving_methods({**ablations(), **strides()}, **self.options(setting, bench))


@dataclass(frozen=True)
class RetrievalQuestion:
    """A prompt, to be measured in one setting.

    Attributes:
        id, name (`str`): What it is called; the id with the setting.
        prompt_ids (`list[int]`): The prompt.
        answer_ids (`list[int]`, *optional*): The recorded answer, if it is to be forced.
        ablated (`bool`): Whether all methods are measured, or the main ones.
        runs (`int`): How often each method is measured.
        searched ([`Searched`]): All questions have the same.
        setting (`str`): One of its settings.
    """

    id: str
    name: str
    prompt_ids: list[int]
    answer_ids: list[int] | None
    ablated: bool
    runs: int
    searched: Searched
    setting: str = ""


def with_each_setting(question: RetrievalQuestion) -> list[RetrievalQuestion]:
    """A question once for each setting."""
    return [
        replace(question, id=f"{question.name}, {setting}", setting=setting)
        for setting in question.searched.settings
    ]


def measure_retrieval(bench: Bench, question: RetrievalQuestion) -> Iterator[dict[str, Any]]:
    """Decodes by all methods and yields what was measured.

    The model without retrieval, and with transformers' drafts, stands beside them: what all the
    retrieving costs.

    Raises:
        ContextTooShortError: If the model's context does not hold the prompt and its answer.
        IdsDifferError: If ids or passages differ in float32.
    """
    searched, setting = question.searched, question.setting
    prompt_ids, answer_ids = question.prompt_ids, question.answer_ids
    most = bench.new_tokens(answer_ids) + searched.longest_passage
    bench.check_context(question.id, prompt_ids, most)
    methods = [*searched.methods(setting, bench), *bench.possible(transformers_methods())]
    if setting not in bench.warm:  # the first calls compile, probe and load
        bench.warm.add(setting)
        bench.call_all(methods, prompt_ids, answer_ids)
    sampled = searched.samples(setting)
    ablated = question.ablated and not sampled
    if ablated:
        methods += searched.ablations(setting, bench)
    entry, _ = bench.measure(
        question.id, prompt_ids, answer_ids, methods, question.runs, do_sample=sampled
    )
    about = {"retriever": setting, "passages": searched.size(setting), "ablated": ablated}
    yield {**entry, "name": question.name, **about}
