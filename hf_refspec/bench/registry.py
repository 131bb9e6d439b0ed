"""The suites: what each reads, and how one of its questions is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from . import suites
from .knn import KnnStores, knn_prompts
from .measure import Bench
from .options import BenchOptions
from .ralm import Retrievers
from .retrieval import RetrievalQuestion, Searched, measure_retrieval, with_each_setting
from .suites import Question, RecordedAnswer, answered, chat_prompt, neighbours


@dataclass(frozen=True)
class Suite:
    """A suite of questions of one kind.

    Attributes:
        read (callable): Reads all questions, before work starts; each has an `id`.
        measure (callable): Measures one question and yields what comes of it, as plain types.
        parts (callable): Divides a question into those that are measured, and kept where a run is
            stopped, one by one.
    """

    read: Callable[[BenchOptions, PreTrainedTokenizerBase], list[Any]]
    measure: Callable[[Bench, Any], Iterator[dict[str, Any]]]
    parts: Callable[[Any], list[Any]] = lambda question: [question]


def _read_rag(options: BenchOptions, tokenizer: PreTrainedTokenizerBase) -> list[RecordedAnswer]:
    return _numbered(suites.llma_rag(options.file("llma_rag.jsonl"), tokenizer))


def _read_humaneval(
    options: BenchOptions, tokenizer: PreTrainedTokenizerBase
) -> list[RecordedAnswer]:
    return _numbered(suites.humaneval(options.file("HumanEval.jsonl.gz"), tokenizer))


def _read_random(options: BenchOptions, tokenizer: PreTrainedTokenizerBase) -> list[RecordedAnswer]:
    if not options.replay:
        raise ValueError("no-overlap is random text, which no model says by itself; add --replay")
    return _numbered(suites.random_texts(tokenizer))


def _numbered(answers: list[RecordedAnswer]) -> list[RecordedAnswer]:
    return [replace(answer, id=str(number)) for number, answer in enumerate(answers, 1)]


def _read_spec_bench(options: BenchOptions, _: PreTrainedTokenizerBase) -> list[Question]:
    questions = suites.spec_bench(options.file("spec_bench_questions.jsonl"))
    # To replay are those that have a recorded answer.
    return [question for question in questions if question.answers or not options.replay]


def _read_multi_turn(options: BenchOptions, tokenizer: PreTrainedTokenizerBase) -> list[Question]:
    return [each for each in _read_spec_bench(options, tokenizer) if len(each.turns) > 1]


def _read_cached_sessions(
    options: BenchOptions, tokenizer: PreTrainedTokenizerBase
) -> list[Question]:
    if options.replay:
        raise ValueError(
            "cached-sessions needs the model's own answers, to questions of which none is "
            "recorded; run it without --replay"
        )
    return _read_spec_bench(options, tokenizer)


def _ask(bench: Bench, question: RecordedAnswer) -> Iterator[dict[str, Any]]:
    answer_ids = question.answer_ids if bench.replay else None
    entry, _ = bench.measure(question.id, question.prompt_ids, answer_ids)
    yield entry


def _ask_first_turn(bench: Bench, question: Question) -> Iterator[dict[str, Any]]:
    yield next(_converse(bench, question))


def _converse(bench: Bench, question: Question) -> Iterator[dict[str, Any]]:
    """Each turn after those before it, with what the model answered to them."""
    messages: list[str] = []
    for turn, text in enumerate(question.turns):
        messages.append(text)
        prompt_ids = chat_prompt(messages, bench.tokenizer)
        answer_ids = None
        if bench.replay and question.answers is not None:
            answer_ids = answered(question, turn, bench.tokenizer)
        entry, ids = bench.measure(f"{question.id}, turn {turn + 1}", prompt_ids, answer_ids)
        messages.append(bench.tokenizer.decode(ids, skip_special_tokens=True))
        yield entry


def _ask_again(bench: Bench, question: Question) -> Iterator[dict[str, Any]]:
    """The first turn, after the model has answered four questions that mean the same."""
    for text in neighbours(question.turns[0]):
        prompt_ids = chat_prompt([text], bench.tokenizer)
        bench.remember(prompt_ids, bench.answer(question.id, prompt_ids))
    yield from _ask_first_turn(bench, question)


def _read_ralm(
    options: BenchOptions, tokenizer: PreTrainedTokenizerBase
) -> list[RetrievalQuestion]:
    """In a replay LLMA's questions and then Spec-Bench's; a model by itself is asked the latter."""
    searched = Retrievers(options, tokenizer)
    prompts: list[tuple[str, list[int], list[int] | None]] = []
    if options.replay:
        path = options.file("llma_rag.jsonl")
        prompts += [
            (each.id, each.prompt_ids, each.answer_ids)
            for each in _numbered(suites.llma_rag_questions(path, tokenizer))
        ]
    for each in _read_spec_bench(options, tokenizer):
        answer_ids = answered(each, 0, tokenizer) if options.replay else None
        prompts.append((each.id, chat_prompt(each.turns[:1], tokenizer), answer_ids))
    return _retrieval_questions(prompts, options, searched)


def _read_knn(options: BenchOptions, tokenizer: PreTrainedTokenizerBase) -> list[RetrievalQuestion]:
    searched = KnnStores(options, tokenizer)
    prompts = [(name, ids, None) for name, ids in knn_prompts(tokenizer)]
    return _retrieval_questions(prompts, options, searched)


def _retrieval_questions(
    prompts: Any, options: BenchOptions, searched: Searched
) -> list[RetrievalQuestion]:
    return [
        RetrievalQuestion(
            name, name, prompt_ids, answer_ids, number < options.ablate, options.repeat, searched
        )
        for number, (name, prompt_ids, answer_ids) in enumerate(prompts)
    ]


REGISTRY: dict[str, Suite] = {
    "rag": Suite(_read_rag, _ask),
    "humaneval": Suite(_read_humaneval, _ask),
    "spec-bench": Suite(_read_spec_bench, _ask_first_turn),
    "multi-turn": Suite(_read_multi_turn, _converse),
    "cached-sessions": Suite(_read_cached_sessions, _ask_again),
    "no-overlap": Suite(_read_random, _ask),
    "ralm": Suite(_read_ralm, measure_retrieval, with_each_setting),
    "knn": Suite(_read_knn, measure_retrieval, with_each_setting),
}
