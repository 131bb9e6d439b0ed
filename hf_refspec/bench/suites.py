"""Recorded answers to replay, from the files in which others have published them."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RecordedAnswer:
    """A prompt and what some model or person answered, as token ids; the answer ends its text."""

    prompt_ids: list[int]
    answer_ids: list[int]


def llma_rag(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[RecordedAnswer]:
    """The retrieval-augmented prompts of LLMA with davinci-003's answers (arXiv 2304.04487, 3.1).

    Args:
        path (`str` or `Path`): The paper's `rag.jsonl`: `query`, `docs` and `result.text` a line.
        tokenizer (`PreTrainedTokenizerBase`): Of the target model that is imagined.
    """
    answers = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        prompt = "docs:\n" + "\n".join(record["docs"]) + f"\nquery: {record['query']}\nanswer:"
        answers.append(recorded(prompt, record["result"]["text"], tokenizer))
    return answers


def humaneval(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[RecordedAnswer]:
    """The 164 problems of HumanEval with their canonical solutions, as REST measures (section 4.1).

    Args:
        path (`str` or `Path`): `HumanEval.jsonl.gz`: `prompt` and `canonical_solution` a line.
        tokenizer (`PreTrainedTokenizerBase`): Of the target model that is imagined.
    """
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    return [
        recorded(record["prompt"], record["canonical_solution"], tokenizer) for record in records
    ]


def recorded(prompt: str, answer: str, tokenizer: PreTrainedTokenizerBase) -> RecordedAnswer:
    """Tokenises both as one text, so that the answer's first token is the one a model would say."""
    prompt_ids = tokenizer(prompt)["input_ids"]
    ids = tokenizer(prompt + answer)["input_ids"]
    if ids[: len(prompt_ids)] != prompt_ids:  # a token that would reach over the border
        ids = prompt_ids + tokenizer(answer, add_special_tokens=False)["input_ids"]
    return RecordedAnswer(prompt_ids, [*ids[len(prompt_ids) :], tokenizer.eos_token_id])
