"""Prompts with recorded answers, and questions, read from published files."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..shared.prompts import assistant, chat_inputs, user
from .records import Record, read_records

RANDOM_TEXTS, RANDOM_PROMPT, RANDOM_ANSWER = 20, 512, 128
PREFIX = "Please answer the following as well as you can. "


@dataclass(frozen=True)
class RecordedAnswer:
    """A prompt and the recorded answer to it, as token ids; the answer ends with EOS. The documents
    that the prompt contains are its `references`."""

    prompt_ids: list[int]
    answer_ids: list[int]
    references: list[list[int]] | None = None


@dataclass(frozen=True)
class Question:
    """The user's side of a conversation, and the recorded answer to each turn, if there is one."""

    id: str  # its category and number
    turns: list[str]
    answers: list[str] | None = None


def llma_rag(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, passages: bool = True
) -> list[RecordedAnswer]:
    """The retrieval-augmented prompts of LLMA with davinci-003's answers (arXiv 2304.04487, 3.1).

    Without `passages` the prompts are the questions alone, for a model that retrieves. Where the
    tokenizer has a chat template, a prompt with passages is a message of the user.
    """
    answers = []
    for record in read_records(path):
        query, answer = record.text("query"), record.text("result", "text")
        if passages:
            docs = record.texts("docs")
            prompt = "docs:\n" + "\n".join(docs) + f"\nquery: {query}\nanswer:"
            references = tokenizer(docs, add_special_tokens=False)["input_ids"]
            replied = _replied(prompt, answer, tokenizer)
            answers.append(replace(replied, references=references))
        else:
            answers.append(recorded(f"{query}\n", answer.lstrip(), tokenizer))
    return answers


def humaneval(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[RecordedAnswer]:
    """The problems of HumanEval with their canonical solutions, as REST measures (section 4.1)."""
    return [
        recorded(record.text("prompt"), record.text("canonical_solution"), tokenizer)
        for record in read_records(path)
    ]


def recorded(prompt: str, answer: str, tokenizer: PreTrainedTokenizerBase) -> RecordedAnswer:
    """Tokenizes prompt and answer as one text, as a model would have continued it."""
    prompt_ids = tokenizer(prompt, verbose=False)["input_ids"]
    ids = tokenizer(prompt + answer, verbose=False)["input_ids"]
    if ids[: len(prompt_ids)] != prompt_ids:  # a token would span the border
        ids = prompt_ids + tokenizer(answer, add_special_tokens=False)["input_ids"]
    return RecordedAnswer(prompt_ids, [*ids[len(prompt_ids) :], end_of_text(tokenizer)])


def _replied(message: str, answer: str, tokenizer: PreTrainedTokenizerBase) -> RecordedAnswer:
    """A message and the reply to it, by the chat template or, without one, as one text."""
    if tokenizer.chat_template is None:
        return recorded(message, answer, tokenizer)
    return RecordedAnswer(chat_prompt([message], tokenizer), _closed(answer.lstrip(), tokenizer))


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> int:
    """The EOS token, which ends every recorded answer; `ValueError` if the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path} has no EOS token, which ends recorded "
            "answers; choose another --tokenizer, or leave out --replay"
        )
    return int(tokenizer.eos_token_id)


def spec_bench(path: str | Path) -> list[Question]:
    """The questions of Spec-Bench (arXiv 2401.07851), some of them with a second turn, some with
    references, which are taken as answers."""
    return [_spec_bench_question(record) for record in read_records(path)]


def _spec_bench_question(record: Record) -> Question:
    turns, answers = record.texts("turns"), record.content.get("reference") or []
    texts = [each for each in answers if isinstance(each, str) and each.strip()]
    name = f"{record.text('category')}/{record.content.get('question_id')}"
    return Question(name, turns, texts if len(texts) == len(answers) == len(turns) else None)


def answered(question: Question, turn: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of the recorded answer to a turn, with EOS."""
    assert question.answers is not None
    return _closed(question.answers[turn], tokenizer)


def _closed(answer: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [*tokenizer(answer, add_special_tokens=False)["input_ids"], end_of_text(tokenizer)]


def taking_turns(questions: list[Question]) -> list[Question]:
    """The questions with the categories taking turns, so that the first few cover many."""
    counts: Counter[str] = Counter()

    def earlier(question: Question) -> int:
        category = question.id.partition("/")[0]
        counts[category] += 1
        return counts[category]

    return sorted(questions, key=earlier)


def batches(questions: list[Question], size: int) -> list[list[Question]]:
    """The questions in batches of at most `size`, each of one category; the categories take turns
    here too."""
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.id.partition("/")[0], []).append(question)
    most = max(map(len, by_category.values()), default=0)
    starts = range(0, most, size)
    parts = (each[start : start + size] for start in starts for each in by_category.values())
    return [part for part in parts if part]


def chat_prompt(messages: list[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of a conversation, in which user and model alternate, for the model to continue; by
    the chat template, if the tokenizer has one."""
    if tokenizer.chat_template is None:
        return tokenizer("".join(f"{message}\n\n" for message in messages))["input_ids"]
    chat = [(assistant if i % 2 else user)(message) for i, message in enumerate(messages)]
    return chat_inputs(tokenizer, chat)["input_ids"][0].tolist()


def neighbours(question: str) -> list[str]:
    """Four variants of a question with the same meaning."""
    words = question.split(" ")
    swapped = list(words)
    for i in range(2, len(words) - 1, 8):
        swapped[i], swapped[i + 1] = words[i + 1], words[i]
    return [
        " ".join(word for i, word in enumerate(words) if i % 7 != 3),
        " ".join(word for i, word in enumerate(words) if i % 11 != 6),
        " ".join(swapped),
        PREFIX + question,
    ]


def random_texts(tokenizer: PreTrainedTokenizerBase) -> list[RecordedAnswer]:
    """Random tokens, which hardly repeat: the worst case for a drafter."""
    special = set(tokenizer.all_special_ids)
    ordinary = [token for token in range(len(tokenizer)) if token not in special]
    rng = np.random.default_rng(0)
    texts = rng.choice(ordinary, (RANDOM_TEXTS, RANDOM_PROMPT + RANDOM_ANSWER)).tolist()
    return [RecordedAnswer(ids[:RANDOM_PROMPT], ids[RANDOM_PROMPT:]) for ids in texts]
