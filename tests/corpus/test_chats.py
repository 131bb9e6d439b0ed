"""Chats whose contents are lists of parts, as OpenAI's clients and vision-language sets have."""

import json

import pytest

import hf_refspec as rs
from hf_refspec.apps.bench.measure import Chat, read_chats
from tests.helpers.byte_model import changed

IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
PARTS = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "h"}, IMAGE, {"type": "text", "text": "i"}],
    },
    {"role": "assistant", "content": [{"type": "output_text", "text": "hello"}]},
]
LAYOUTS = {
    "messages": PARTS,
    "ShareGPT": [{"from": each["role"], "value": each["content"]} for each in PARTS],
    "with null columns": [
        {**each, "content": [{"image_url": None, "text": None, **part} for part in each["content"]]}
        for each in PARTS
    ],
    "strings": [{**PARTS[0], "content": ["h", IMAGE, "i"]}, {**PARTS[1], "content": ["hello"]}],
}
PRINTS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
ADDS = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] | trim + '\n' }}{% endfor %}"


@pytest.mark.parametrize("template", [PRINTS, ADDS])
@pytest.mark.parametrize("chat", LAYOUTS.values(), ids=LAYOUTS)
def test_every_corpus_has_the_texts_of_the_parts_joined(
    chat, template, tokenizer, tmp_path, caplog
):
    tokenizer = changed(tokenizer, chat_template=template)
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": chat}))
    store = rs.Datastore.build(path, tokenizer, tmp_path / "store")
    [ids] = store.iter_documents()
    assert tokenizer.decode(ids) == "user: hi\nassistant: hello\n"
    base = rs.KnowledgeBase.build(path, tokenizer, None, tmp_path / "base")
    assert base.text(0) == "user: hi\nassistant: hello\n"
    assert caplog.text.count("skipped 1 message part without text") == 2
    assert read_chats(path) == [Chat(["hi"], ["hello"])]
    assert caplog.text.count("skipped 1 message part without text") == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"role": ["user"]}, r"row 1: the role of a message must be a text, but is \['user'\]"),
        (
            {"content": {"a": 1}},
            r"row 1: the content of a message must be a text or a list of parts",
        ),
        ({"content": [1, 2]}, r"row 1: the content of a message must .* but is \[1, 2\]"),
    ],
)
def test_what_is_no_message_is_named_with_its_row(change, message, tokenizer, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [{**PARTS[1], **change}]}))
    with pytest.raises(ValueError, match=message):
        rs.Datastore.build(path, tokenizer, tmp_path / "store")
    with pytest.raises(ValueError, match=message):
        read_chats(path)
