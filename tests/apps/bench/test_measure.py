"""Prompts and recorded chats in files of rows."""

import json
from pathlib import Path

import datasets
import pytest

from hf_refspec.apps.bench.measure import Chat, read_chats, rendered, taking_turns
from tests.helpers.byte_model import changed

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
]
LAYOUTS = {
    "Spec-Bench and SPEED-Bench": (
        {"turns": ["a", "b"], "category": "math", "reference": ["1", "2"]},
        Chat(["a", "b"], ["1", "2"], "", "math"),
    ),
    "references that are no texts": ({"turns": ["a"], "reference": [["1", "2"]]}, Chat(["a"], [])),
    "messages": ({"messages": MESSAGES}, Chat(["one", "three"], ["two"], "Be brief.")),
    "a prompt of messages": (
        {"prompt": MESSAGES[:2], "completion": "two"},
        Chat(["one"], ["two"], "Be brief."),
    ),
    "a question and its answer": ({"question": "a", "answer": "b"}, Chat(["a"], ["b"])),
    "a text": ({"text": "a", "id": 3}, Chat(["a"], [])),
}


@pytest.mark.parametrize(("row", "chat"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_every_layout_is_read(row, chat, kind, tmp_path):
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        datasets.Dataset.from_list([row]).to_parquet(path)
    else:
        path.write_text(f"{json.dumps(row)}\n\n", encoding="utf-8-sig")
    assert read_chats(path) == [chat]


def test_later_turns_come_after_the_answers_to_the_earlier_ones():
    chat = Chat(["one", "three"], [], "Be brief.")
    assert chat.until(1, ["two"]) == MESSAGES
    assert chat.until(0, ["two"]) == MESSAGES[:2]


def test_categories_take_turns_and_rows_without_one_stay_in_order():
    chats = [Chat([str(i)], [], "", category) for i, category in enumerate("aabac")]
    assert [chat.turns for chat in taking_turns(chats)] == [["0"], ["2"], ["4"], ["1"], ["3"]]
    plain = [Chat([str(i)], []) for i in range(3)]
    assert taking_turns(plain) == plain


def test_turns_that_are_not_asked_cannot_be_refused(tokenizer, tmp_path):
    refusal = "{% if messages[1:] %}{{ raise_exception('a message too many') }}{% endif %}"
    refusing = changed(tokenizer, chat_template=refusal + "{{ messages[0].content }}")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"turns": ["one", "two"]}))
    chats = read_chats(path, turns=1)
    assert rendered(chats, refusing, None) == chats == [Chat(["one"], [])]
    with pytest.raises(ValueError, match="row 1: the chat template refuses this chat"):
        rendered(read_chats(path), refusing, None)


def test_rows_without_a_text_are_skipped_counted_and_named(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a"}\n{"question": null}\n{"question": "", "answer": "b"}\n')
    assert read_chats(path) == [Chat(["a"], [])]
    assert "skipped 2 rows with an empty column question" in caplog.text


REFUSED = {
    "no file": (None, "is not a file; name one of .jsonl, .json, .csv, .parquet, also with .gz"),
    "no rows": ("\n", "has no prompts"),
    "no text": ('{"question": null}\n', "has no prompts"),
    "no JSON": ("a prompt\n", "row 1 is not valid .jsonl: Expecting value at column 1"),
    "no end": ('{"prompt": "a\n', "Invalid control character at column 14"),
    "no object": ("[1]\n", "row 1 has none of the columns turns, "),
    "no column": ('{"prompt": "a"}\n{"input": "a"}\n', "row 2 has none of the columns"),
    "a number": ('{"prompt": 1}\n', "row 1: prompt must be text, or a list"),
    "numbers": ('{"turns": [1]}\n', "row 1: turns must be text, or a list"),
    "a tool's message": (
        '{"messages": [{"role": "tool", "content": "a"}]}\n',
        "row 1: messages has the role 'tool'; leave that message out",
    ),
    "no user": ('{"messages": [{"role": "system", "content": "a"}]}\n', "messages must be text"),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_prompt_is_named_with_its_row(content, message, tmp_path):
    path = Path(tmp_path, "prompts.jsonl")
    if content is not None:
        path.write_text(content)
    with pytest.raises((OSError, ValueError), match=r"prompts\.jsonl") as raised:
        read_chats(path)
    assert message in str(raised.value)


def test_a_file_of_another_kind_is_told_which_are_read(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a prompt")
    message = (
        r"not valid \.jsonl: .*; \.jsonl, \.json, \.csv, \.parquet and these with \.gz are read"
    )
    with pytest.raises(ValueError, match=message):
        read_chats(path)
