"""Recorded answers of published files, as ids."""

import json

import pytest
from suites import (
    humaneval,
    llma_rag,
    mt_bench,
    random_texts,
    recorded,
    recorded_turns,
    spec_bench,
)

from hf_refspec.apps.shared.loading import load_tokenizer
from tests.helpers.byte_model import changed
from tests.helpers.shared_data import data_file


@pytest.fixture
def templateless(tokenizer):
    """A tokenizer without a chat template."""
    return changed(tokenizer, chat_template=None)


def test_a_prompt_shows_the_documents_and_they_are_its_references(data, tokenizer, templateless):
    first, *_ = llma_rag(data / "llma_rag.jsonl", templateless)
    assert templateless.decode(first.prompt_ids) == (
        "docs:\nTom is a cat.\nx\nquery: who is Tom?\nanswer:"
    )
    assert [templateless.decode(each) for each in first.references] == ["Tom is a cat.", "x"]
    assert first.answer_ids[-1] == tokenizer.eos_token_id
    chat, *_ = llma_rag(data / "llma_rag.jsonl", tokenizer)
    assert "user" in tokenizer.decode(chat.prompt_ids)


def test_a_query_that_holds_its_document_is_the_prompt(tmp_path, templateless):
    row = {"query": "Sum up: A cat.", "docs": ["A cat."], "result": {"text": "1####Cat"}}
    (tmp_path / "cnndm.jsonl").write_text(json.dumps(row))
    [answer] = llma_rag(tmp_path / "cnndm.jsonl", templateless)
    assert templateless.decode(answer.prompt_ids) == "Sum up: A cat."
    assert [templateless.decode(each) for each in answer.references] == ["A cat."]


def test_problems_are_continued_and_answers_end(data, tokenizer):
    first, _ = humaneval(data / "HumanEval.jsonl.gz", tokenizer)
    assert tokenizer.decode(first.prompt_ids) == "def f0(width):\n"
    assert tokenizer.decode(first.answer_ids[:-1]) == "    return width * 0\n"


def test_a_prompt_stays_as_it_is_where_a_token_would_span_its_end():
    tokenizer = load_tokenizer()
    answer = recorded("the weath", "er is fine", tokenizer)
    assert answer.prompt_ids == tokenizer("the weath")["input_ids"]
    assert tokenizer.decode(answer.answer_ids[:-1]) == "er is fine"


def test_answers_are_taken_where_each_turn_has_one(data, tokenizer):
    writing, math, translation, rag = spec_bench(data / "spec_bench_questions.jsonl")
    assert (writing.answers, rag.answers) == ([], [])
    assert math.answers == ["It is four.", "It is five."] and translation.answers == ["a cat"]
    first, second = recorded_turns(math, tokenizer)
    assert "It is four." in tokenizer.decode(second.prompt_ids)
    assert "It is four." not in tokenizer.decode(first.prompt_ids)


def test_answers_to_mt_bench_stand_behind_their_questions(tmp_path, tokenizer):
    answers, questions = tmp_path / "answers.jsonl", tmp_path / "questions.jsonl"
    answers.write_text('{"question_id": 81, "choices": [{"turns": ["A tale.</s>", "Again."]}]}\n')
    questions.write_text('{"question_id": 81, "turns": ["Tell a tale.", "Once more."]}\n')
    first, second = mt_bench(answers, questions, tokenizer)
    assert tokenizer.decode(first.answer_ids[:-1]) == "A tale."
    assert "A tale." in (prompt := tokenizer.decode(second.prompt_ids)) and "Once more." in prompt


def test_random_texts_are_the_same_in_every_run(tokenizer):
    assert random_texts(tokenizer) == random_texts(tokenizer)


def test_the_published_files_have_as_many_texts_as_their_papers_say(tokenizer):
    assert len(spec_bench(data_file("spec_bench_questions.jsonl"))) == 480
    assert len(llma_rag(data_file("llma_rag.jsonl"), tokenizer)) == 100
    assert len(humaneval(data_file("HumanEval.jsonl.gz"), tokenizer)) == 164
