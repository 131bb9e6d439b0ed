"""The suites: what each reads, how one of its questions is measured, and how that is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from . import knn, latency, ralm, report, retrieval_report, suites
from .measure import Bench
from .retrieval_ways import ABLATED_QUESTIONS
from .suites import Question, RecordedAnswer, answered, chat_prompt, neighbours


@dataclass(frozen=True)
class Source:
    """Where questions come from.

    Attributes:
        tokenizer (`PreTrainedTokenizerBase`): The target model's.
        replay (`bool`): Whether recorded answers will be forced.
        data (`Path`, *optional*): The folder with the data files.
        knowledge_base (`str`, *optional*): What passages are retrieved from.
        encoder (`str`, *optional*): A sentence-transformers model, for dense retrieval.
        distractors (`int`): How many the exact index over the knowledge base is padded with.
        milvus (`str`, *optional*): The address or file of a Milvus to search as well.
        knn_datastore (`str`, *optional*): What a kNN-LM looks its neighbours up in.
        repeat (`int`): How often each way to retrieve is measured.
    """

    tokenizer: PreTrainedTokenizerBase
    replay: bool
    data: Path | None = None
    knowledge_base: str | None = None
    encoder: str | None = None
    distractors: int = 0
    milvus: str | None = None
    knn_datastore: str | None = None
    repeat: int = 1

    def file(self, name: str) -> Path:
        """A data file.

        Raises:
            ValueError: If no folder was named.
        """
        if self.data is None:
            raise ValueError(f"{name} is needed; name the folder that it is in with --data")
        return self.data / name


@dataclass(frozen=True)
class Named:
    """A recorded answer with a name."""

    id: str
    answer: RecordedAnswer


@dataclass(frozen=True)
class Suite:
    """A suite of questions of one kind.

    Attributes:
        read (callable): Reads all questions, before work starts; each has an `id`.
        measure (callable): Measures one question and yields what comes of it, as plain types.
        tables (callable): The Markdown of all that `measure` has yielded.
        decodes (`bool`): Whether it decodes with the model, all ways in turn.
        parts (callable): Divides a question into those that are measured, and kept where a run is
            stopped, one by one.
        options (`tuple[str, ...]`): The options that it reads, of those that not all do.
    """

    read: Callable[[Source], list[Any]]
    measure: Callable[[Bench, Any], Iterator[dict[str, Any]]]
    tables: Callable[[list[dict[str, Any]]], str] = report.decoding_table
    decodes: bool = True
    parts: Callable[[Any], list[Any]] = lambda question: [question]
    options: tuple[str, ...] = ("datastore",)


def _read_rag(source: Source) -> list[Named]:
    return _named(suites.llma_rag(source.file("llma_rag.jsonl"), source.tokenizer))


def _read_humaneval(source: Source) -> list[Named]:
    return _named(suites.humaneval(source.file("HumanEval.jsonl.gz"), source.tokenizer))


def _read_random(source: Source) -> list[Named]:
    if not source.replay:
        raise ValueError("no-overlap is random text, which no model says by itself; add --replay")
    return _named(suites.random_texts(source.tokenizer))


def _named(answers: list[RecordedAnswer]) -> list[Named]:
    return [Named(str(number), answer) for number, answer in enumerate(answers, 1)]


def _read_spec_bench(source: Source) -> list[Question]:
    questions = suites.spec_bench(source.file("spec_bench_questions.jsonl"))
    # To replay are those that have a recorded answer.
    return [question for question in questions if question.answers or not source.replay]


def _read_multi_turn(source: Source) -> list[Question]:
    return [question for question in _read_spec_bench(source) if len(question.turns) > 1]


def _read_cached_sessions(source: Source) -> list[Question]:
    if source.replay:
        raise ValueError(
            "cached-sessions needs the model's own answers, to questions of which none is "
            "recorded; run it without --replay"
        )
    return _read_spec_bench(source)


def _ask(bench: Bench, question: Named) -> Iterator[dict[str, Any]]:
    answer = question.answer
    entry, _ = bench.ask(
        question.id, answer.prompt_ids, answer.answer_ids if bench.replay else None
    )
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
        entry, ids = bench.ask(f"{question.id}, turn {turn + 1}", prompt_ids, answer_ids)
        messages.append(bench.tokenizer.decode(ids, skip_special_tokens=True))
        yield entry


def _ask_again(bench: Bench, question: Question) -> Iterator[dict[str, Any]]:
    """The first turn, after the model has answered four questions that mean the same."""
    for text in neighbours(question.turns[0]):
        prompt_ids = chat_prompt([text], bench.tokenizer)
        bench.remember(prompt_ids, bench.answer(question.id, prompt_ids))
    yield from _ask_first_turn(bench, question)


def _read_latency(source: Source) -> list[latency.Point]:
    return latency.latency_points()


def _measure_latency(bench: Bench, point: latency.Point) -> Iterator[dict[str, Any]]:
    yield latency.measure_latency(point, bench.tokenizer)


def _read_ralm(source: Source) -> list[ralm.RalmQuestion]:
    if source.knowledge_base is None:
        raise ValueError("ralm retrieves passages: name a knowledge base with --knowledge-base")
    asked: list[tuple[str, list[int], list[int] | None]]
    if source.replay:
        path = source.file("llma_rag.jsonl")
        asked = [
            (each.id, each.answer.prompt_ids, each.answer.answer_ids)
            for each in _named(suites.llma_rag_questions(path, source.tokenizer))
        ]
        asked += [
            (
                each.id,
                chat_prompt(each.turns[:1], source.tokenizer),
                answered(each, 0, source.tokenizer),
            )
            for each in _read_spec_bench(source)
        ]
    else:
        asked = [
            (each.id, chat_prompt(each.turns[:1], source.tokenizer), None)
            for each in _read_spec_bench(source)
        ]
    retrievers = ralm.Retrievers(
        source.knowledge_base, source.tokenizer, source.encoder, source.distractors, source.milvus
    )
    return [
        ralm.RalmQuestion(each[0], *each, number < ABLATED_QUESTIONS, retrievers, source.repeat)
        for number, each in enumerate(asked)
    ]


def _read_knn(source: Source) -> list[knn.KnnPrompt]:
    if source.knn_datastore is None:
        raise ValueError(
            "knn looks up neighbours: name a datastore that KnnDatastore.build has made with the "
            "model, with --knn-datastore"
        )
    if source.replay:
        raise ValueError("knn needs the model's own text; run it without --replay")
    stores = knn.KnnStores(source.knn_datastore, source.tokenizer)
    return [
        knn.KnnPrompt(each[0], *each, number < ABLATED_QUESTIONS, stores, source.repeat)
        for number, each in enumerate(knn.knn_prompts(source.tokenizer))
    ]


SUITES: dict[str, Suite] = {
    "rag": Suite(_read_rag, _ask),
    "humaneval": Suite(_read_humaneval, _ask),
    "spec-bench": Suite(_read_spec_bench, _ask_first_turn),
    "multi-turn": Suite(_read_multi_turn, _converse),
    "cached-sessions": Suite(_read_cached_sessions, _ask_again),
    "no-overlap": Suite(_read_random, _ask),
    "latency": Suite(
        _read_latency, _measure_latency, report.latency_table, decodes=False, options=()
    ),
    "ralm": Suite(
        _read_ralm,
        ralm.measure_ralm,
        retrieval_report.retrieval_tables,
        decodes=False,
        parts=ralm.with_each_retriever,
        options=("knowledge_base", "encoder", "distractors", "milvus", "repeat"),
    ),
    "knn": Suite(
        _read_knn,
        knn.measure_knn,
        retrieval_report.retrieval_tables,
        decodes=False,
        parts=knn.with_each_setting,
        options=("knn_datastore", "repeat"),
    ),
}


def find_suites(names: list[str]) -> dict[str, Suite]:
    """The suites of these names.

    Raises:
        ValueError: If there is none of a name.
    """
    for name in names:
        if name not in SUITES:
            raise ValueError(f"{name!r} is no suite; there are {', '.join(SUITES)}")
    return {name: SUITES[name] for name in names}
