"""Recorded answers are read as published, and tokenised as one text with their prompt."""

from __future__ import annotations

import copy
import json

import pytest
from bench_samples import PROBLEMS
from shared_data import data_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_refspec.apps.bench.suites import (
    Question,
    chat_prompt,
    humaneval,
    llma_rag,
    neighbours,
    random_texts,
    recorded,
    spec_bench,
    taking_turns,
)


def without_template(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = None
    return other


def test_humaneval_has_the_prompts_and_their_solutions(data, tokenizer):
    answers = humaneval(data / "HumanEval.jsonl.gz", tokenizer)
    for answer, problem in zip(answers, PROBLEMS, strict=True):
        assert tokenizer.decode(answer.prompt_ids) == problem["prompt"]
        assert tokenizer.decode(answer.answer_ids[:-1]) == problem["canonical_solution"]
        assert answer.answer_ids[-1] == tokenizer.eos_token_id


def test_llma_rag_puts_the_documents_before_the_question(tmp_path, tokenizer):
    record = {"query": "who?", "docs": ["one", "two"], "result": {"text": " me"}}
    (tmp_path / "rag.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    prompt = "docs:\none\ntwo\nquery: who?\nanswer:"
    [answer] = llma_rag(tmp_path / "rag.jsonl", without_template(tokenizer))
    assert tokenizer.decode(answer.prompt_ids) == prompt
    assert tokenizer.decode(answer.answer_ids[:-1]) == " me"
    assert [tokenizer.decode(ids) for ids in answer.references] == ["one", "two"]
    [reply] = llma_rag(tmp_path / "rag.jsonl", tokenizer)
    assert tokenizer.decode(reply.prompt_ids) == f"user: {prompt}\nassistant: "
    assert tokenizer.decode(reply.answer_ids) == "me</s>"


def test_a_token_that_would_reach_over_the_border_is_cut_there():
    vocab = {"a": 0, "b": 1, "ab": 2, "</s>": 3}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert tokenizer("ab")["input_ids"] == [2]
    answer = recorded("a", "b", tokenizer)
    assert (answer.prompt_ids, answer.answer_ids) == ([0], [1, 3])
    answer = recorded("b", "ab", tokenizer)
    assert (answer.prompt_ids, answer.answer_ids) == ([1], [2, 3])


def test_a_malformed_line_is_named(tmp_path, data, tokenizer):
    path = data / "llma_rag.jsonl"
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"query": "who?", "docs": ["x"]}\n')
    with pytest.raises(ValueError, match=r"llma_rag.jsonl, line 4: result.text must be text"):
        llma_rag(path, tokenizer)


def test_questions_have_answers_where_there_is_one_for_each_turn(data):
    questions = spec_bench(data / "spec_bench_questions.jsonl")
    assert [question.id for question in questions] == [
        "writing/81",
        "math/101",
        "translation/161",
        "rag/321",
    ]
    assert [question.answers for question in questions] == [
        None,
        ["It is four.", "It is five."],
        ["a cat"],
        None,
    ]


def test_categories_take_turns():
    ids = ["a/1", "a/2", "a/3", "b/4", "b/5", "c/6"]
    questions = taking_turns([Question(each, ["x"]) for each in ids])
    assert [question.id for question in questions] == ["a/1", "b/4", "c/6", "a/2", "b/5", "a/3"]


def test_a_tokenizer_without_an_end_of_text_is_refused(tokenizer):
    without = copy.deepcopy(tokenizer)
    without.eos_token = None
    with pytest.raises(ValueError, match="has no EOS token"):
        recorded("a", "b", without)


def test_neighbours_are_four_different_questions_and_the_same_each_time():
    question = " ".join(f"word{i}" for i in range(30))
    texts = neighbours(question)
    assert len({question, *texts}) == 5
    assert texts == neighbours(question)
    assert all(len(set(text.split()) & set(question.split())) >= 25 for text in texts)
    assert sorted(texts[2].split()) == sorted(question.split())
    assert len(neighbours("Why?")) == 4


def test_a_conversation_goes_through_the_chat_template_if_there_is_one(tokenizer):
    ids = chat_prompt(["hi", "ho", "ha"], tokenizer)
    assert tokenizer.decode(ids) == "user: hi\nassistant: ho\nuser: ha\nassistant: "
    plain = without_template(tokenizer)
    assert plain.decode(chat_prompt(["hi", "ho"], plain)) == "hi\n\nho\n\n"


def test_random_texts_are_ordinary_tokens_and_the_same_each_time(tokenizer):
    texts = random_texts(tokenizer)
    assert texts == random_texts(tokenizer)
    assert {len(text.prompt_ids) for text in texts} == {512}
    assert {len(text.answer_ids) for text in texts} == {128}
    special = set(tokenizer.all_special_ids)
    assert not any(special & {*text.prompt_ids, *text.answer_ids} for text in texts)


def test_what_was_published_is_read():
    tokenizer = AutoTokenizer.from_pretrained(data_file("llama2-tokenizer"))
    answers = humaneval(data_file("HumanEval.jsonl.gz"), tokenizer)
    assert len(answers) == 164 and all(len(answer.answer_ids) > 1 for answer in answers)
    questions = spec_bench(data_file("spec_bench_questions.jsonl"))
    assert len(questions) == 480
    assert sum(len(question.turns) > 1 for question in questions) == 80
    answered = {question.id.split("/")[0] for question in questions if question.answers}
    assert {"translation", "summarization", "math_reasoning"} <= answered
