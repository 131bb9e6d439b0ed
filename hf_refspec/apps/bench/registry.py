"""The suites: which questions each asks, and how one of them is measured."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

from transformers import PreTrainedTokenizerBase

from . import suites
from .measure import Bench
from .methods import with_references
from .suites import Question, RecordedAnswer, answered, chat_prompt, neighbours
from .summary import Entry

# A question that is read and checked, still to be measured: it yields an entry for each turn.
Job: TypeAlias = Callable[[Bench], Iterator[Entry]]


def _recorded(
    read: Callable[[Path, PreTrainedTokenizerBase], list[RecordedAnswer]],
    file: str,
    args: Namespace,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Job]:
    return _asked(read(data_file(args, file), tokenizer), args)


def _no_overlap(args: Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Job]:
    if not args.replay:
        raise ValueError("no-overlap is random text, which no model writes freely; add --replay")
    return _asked(suites.random_texts(tokenizer), args)


def _summarization(args: Namespace, _: PreTrainedTokenizerBase) -> list[Job]:
    articles = [each for each in questions(args) if each.id.startswith("summarization/")]
    return [partial(_converse, each, 1) for each in articles[: args.limit]]


def _spec_bench(args: Namespace, _: PreTrainedTokenizerBase) -> list[Job]:
    chosen = questions(args)[: args.limit]
    if args.batch_size is None:
        return [partial(_converse, each, 1) for each in chosen]
    return [partial(_ask_together, each) for each in suites.batches(chosen, args.batch_size)]


def _multi_turn(args: Namespace, _: PreTrainedTokenizerBase) -> list[Job]:
    long = [each for each in questions(args) if len(each.turns) > 1]
    return [partial(_converse, each, len(each.turns)) for each in long[: args.limit]]


def _cached_sessions(args: Namespace, _: PreTrainedTokenizerBase) -> list[Job]:
    if args.replay:
        raise ValueError(
            "cached-sessions needs the model's own answers, to questions of which none is "
            "recorded; run it without --replay"
        )
    return [partial(_ask_again, each) for each in questions(args)[: args.limit]]


SUITES: dict[str, Callable[[Namespace, PreTrainedTokenizerBase], list[Job]]] = {
    "rag": partial(_recorded, suites.llma_rag, "llma_rag.jsonl"),
    "humaneval": partial(_recorded, suites.humaneval, "HumanEval.jsonl.gz"),
    "spec-bench": _spec_bench,
    "summarization": _summarization,
    "multi-turn": _multi_turn,
    "cached-sessions": _cached_sessions,
    "no-overlap": _no_overlap,
}


def data_file(args: Namespace, name: str) -> Path:
    """The path of a data file in the folder that `--data` names."""
    if args.data is None:
        raise ValueError(f"{name} is needed; name its folder with --data")
    return args.data / name


def questions(args: Namespace) -> list[Question]:
    """Spec-Bench's questions, its categories taking turns; in a replay those with an answer."""
    every = suites.spec_bench(data_file(args, "spec_bench_questions.jsonl"))
    return suites.taking_turns([each for each in every if each.answers or not args.replay])


def _asked(answers: list[RecordedAnswer], args: Namespace) -> list[Job]:
    return [partial(_ask, *each) for each in enumerate(answers[: args.limit], 1)]


def _ask(number: int, answer: RecordedAnswer, bench: Bench) -> Iterator[Entry]:
    answer_ids = answer.answer_ids if bench.replay else None
    methods = with_references(bench.methods, answer.references)
    entry, _ = bench.measure(str(number), [answer.prompt_ids], answer_ids, methods)
    yield entry


def _converse(
    question: Question, turns: int, bench: Bench, references: list[list[int]] | None = None
) -> Iterator[Entry]:
    """Each turn, after the earlier ones and the model's answers to them."""
    messages: list[str] = []
    methods = with_references(bench.methods, references)
    for turn, text in enumerate(question.turns[:turns]):
        messages.append(text)
        prompt_ids = chat_prompt(messages, bench.tokenizer)
        answer_ids = answered(question, turn, bench.tokenizer) if bench.replay else None
        name = f"{question.id}, turn {turn + 1}"
        entry, ids = bench.measure(name, [prompt_ids], answer_ids, methods)
        messages.append(bench.tokenizer.decode(ids, skip_special_tokens=True))
        yield entry


def _ask_together(together: list[Question], bench: Bench) -> Iterator[Entry]:
    """The first turns of questions of one category, as the rows of one batch."""
    prompts = [chat_prompt(each.turns[:1], bench.tokenizer) for each in together]
    numbers = [each.id.partition("/")[2] for each in together[1:]]
    entry, _ = bench.measure(", ".join([together[0].id, *numbers]), prompts)
    yield entry


def _ask_again(question: Question, bench: Bench) -> Iterator[Entry]:
    """The first turn, after the model has answered four similar questions."""
    answers = []
    for text in neighbours(question.turns[0]):
        prompt_ids = chat_prompt([text], bench.tokenizer)
        answers.append(bench.answer(question.id, prompt_ids))
        bench.remember(prompt_ids, answers[-1])
    yield from _converse(question, 1, bench, references=answers)
