"""The suites: which questions each asks, and how one of them is measured."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

from transformers import PreTrainedTokenizerBase

from . import suites
from .knn import knn_prompts, knn_settings
from .measure import Bench
from .ralm import ralm_settings
from .retrieval import Setting, measure_retrieval
from .suites import Question, RecordedAnswer, answered, chat_prompt, neighbours
from .summary import Entry

# A question that is read and checked, and still to be measured: it yields an entry for each turn.
Job: TypeAlias = Callable[[Bench], Iterator[Entry]]
Prompt: TypeAlias = "tuple[str, list[int], list[int] | None]"  # name, prompt ids, recorded answer


def _rag(args: Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Job]:
    answers = suites.llma_rag(data_file(args, "llma_rag.jsonl"), tokenizer)
    return [partial(_ask, *each) for each in enumerate(answers[: args.limit], 1)]


def _humaneval(args: Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Job]:
    answers = suites.humaneval(data_file(args, "HumanEval.jsonl.gz"), tokenizer)
    return [partial(_ask, *each) for each in enumerate(answers[: args.limit], 1)]


def _no_overlap(args: Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Job]:
    if not args.replay:
        raise ValueError("no-overlap is random text, which no model writes freely; add --replay")
    answers = suites.random_texts(tokenizer)
    return [partial(_ask, *each) for each in enumerate(answers[: args.limit], 1)]


def _spec_bench(args: Namespace, _: PreTrainedTokenizerBase) -> list[Job]:
    questions = _questions(args)[: args.limit]
    if args.batch_size is None:
        return [partial(_converse, each, 1) for each in questions]
    batches = suites.batches(questions, args.batch_size)
    return [partial(_ask_together, each) for each in batches]


def _multi_turn(args: Namespace, _: PreTrainedTokenizerBase) -> list[Job]:
    long = [each for each in _questions(args) if len(each.turns) > 1]
    return [partial(_converse, each, len(each.turns)) for each in long[: args.limit]]


def _cached_sessions(args: Namespace, _: PreTrainedTokenizerBase) -> list[Job]:
    if args.replay:
        raise ValueError(
            "cached-sessions needs the model's own answers, to questions of which none is "
            "recorded; run it without --replay"
        )
    return [partial(_ask_again, each) for each in _questions(args)[: args.limit]]


def _ralm(args: Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Job]:
    """In a replay LLMA's questions, then Spec-Bench's; else only the latter."""
    settings = ralm_settings(args, tokenizer)
    prompts: list[Prompt] = []
    if args.replay:
        recorded = suites.llma_rag(data_file(args, "llma_rag.jsonl"), tokenizer, passages=False)
        prompts += [
            (str(i), each.prompt_ids, each.answer_ids) for i, each in enumerate(recorded, 1)
        ]
    for each in _questions(args):
        answer_ids = answered(each, 0, tokenizer) if args.replay else None
        prompts.append((each.id, chat_prompt(each.turns[:1], tokenizer), answer_ids))
    return _with_each_setting(settings, prompts[: args.limit])


def _knn(args: Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Job]:
    settings = knn_settings(args, tokenizer)
    prompts: list[Prompt] = [(name, ids, None) for name, ids in knn_prompts(tokenizer)]
    return _with_each_setting(settings, prompts[: args.limit])


SUITES: dict[str, Callable[[Namespace, PreTrainedTokenizerBase], list[Job]]] = {
    "rag": _rag,
    "humaneval": _humaneval,
    "spec-bench": _spec_bench,
    "multi-turn": _multi_turn,
    "cached-sessions": _cached_sessions,
    "no-overlap": _no_overlap,
    "ralm": _ralm,
    "knn": _knn,
}
RETRIEVING = ("ralm", "knn")


def data_file(args: Namespace, name: str) -> Path:
    """The path of a data file.

    Raises:
        ValueError: If no folder was named.
    """
    if args.data is None:
        raise ValueError(f"{name} is needed; name the folder that it is in with --data")
    return args.data / name


def _questions(args: Namespace) -> list[Question]:
    """Spec-Bench's questions, its categories taking turns; in a replay those with an answer."""
    questions = suites.spec_bench(data_file(args, "spec_bench_questions.jsonl"))
    return suites.taking_turns(
        [question for question in questions if question.answers or not args.replay]
    )


def _with_each_setting(settings: list[Setting], prompts: list[Prompt]) -> list[Job]:
    return [
        partial(measure_retrieval, setting, *prompt) for setting in settings for prompt in prompts
    ]


def _ask(number: int, answer: RecordedAnswer, bench: Bench) -> Iterator[Entry]:
    answer_ids = answer.answer_ids if bench.replay else None
    entry, _ = bench.measure(str(number), [answer.prompt_ids], answer_ids)
    yield entry


def _converse(question: Question, turns: int, bench: Bench) -> Iterator[Entry]:
    """Each turn, after the earlier ones and the model's answers to them."""
    messages: list[str] = []
    for turn, text in enumerate(question.turns[:turns]):
        messages.append(text)
        prompt_ids = chat_prompt(messages, bench.tokenizer)
        answer_ids = answered(question, turn, bench.tokenizer) if bench.replay else None
        entry, ids = bench.measure(f"{question.id}, turn {turn + 1}", [prompt_ids], answer_ids)
        messages.append(bench.tokenizer.decode(ids, skip_special_tokens=True))
        yield entry


def _ask_together(questions: list[Question], bench: Bench) -> Iterator[Entry]:
    """The first turns of some questions of a category, as the rows of one batch."""
    prompts = [chat_prompt(each.turns[:1], bench.tokenizer) for each in questions]
    numbers = [each.id.partition("/")[2] for each in questions[1:]]
    entry, _ = bench.measure(", ".join([questions[0].id, *numbers]), prompts)
    yield entry


def _ask_again(question: Question, bench: Bench) -> Iterator[Entry]:
    """The first turn, after the model has answered four similar questions."""
    for text in neighbours(question.turns[0]):
        prompt_ids = chat_prompt([text], bench.tokenizer)
        bench.remember(prompt_ids, bench.answer(question.id, prompt_ids))
    yield from _converse(question, 1, bench)
