"""Speculative retrieval (arXiv 2401.14021) against the same model waiting for every search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from .measure import Bench
from .methods import Method, transformers_methods


class Searched(Protocol):
    """What is searched: several indexes, or one with several settings."""

    @property
    def settings(self) -> list[str]:
        """The names of all of them."""

    @property
    def longest_passage(self) -> int:
        """The most tokens that are put before a prompt."""

    def size(self, setting: str) -> int:
        """How many there are to search."""

    def samples(self, setting: str) -> bool:
        """Whether the model samples; it does not where ablations are measured."""

    def methods(self, setting: str, bench: Bench) -> list[Method]:
        """The methods to retrieve, the baseline first."""

    def ablations(self, setting: str, bench: Bench) -> list[Method]:
        """More of them, which are measured on the first questions only."""


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
