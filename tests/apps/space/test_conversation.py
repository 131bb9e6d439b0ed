"""A conversation goes on with its document and its answers, and refuses what cannot be answered."""

from __future__ import annotations

import pytest

from hf_refspec import Datastore
from hf_refspec.apps.shared.prompts import chat_inputs, chat_messages
from hf_refspec.apps.space.conversation import Conversation, Host


def test_the_document_stands_before_the_first_message_and_answers_stay(host, run):
    conversation = Conversation()
    first = run("one", conversation, max_new_tokens=8, document="a text\n")
    second = run("two", conversation, max_new_tokens=8, document="another")
    assert first.drafter is second.drafter  # which learns from one answer for the next
    messages = chat_messages(["a text\n\none", "two"], [first.drafted.text])
    inputs = chat_inputs(host.tokenizer, messages)
    output = host.model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert second.drafted.ids == second.plain.ids
    assert second.plain.ids == output[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize(
    ("document", "message", "error"),
    [
        ("", "  \n", "the message is empty"),
        ("x" * 3000, "one", r"the message with its document has 3,\d\d\d .* 2,048"),
    ],
)
def test_what_cannot_be_answered_is_refused(host, document, message, error):
    conversation = Conversation()
    with pytest.raises(ValueError, match=error):
        conversation.ask(host, message, 8, document)
    assert conversation.turns == []


def test_a_conversation_that_is_too_long_is_refused_and_stays(host, run):
    conversation = Conversation()
    run("one", conversation, max_new_tokens=8)
    with pytest.raises(ValueError, match=r"the conversation has .* begin a new one"):
        conversation.ask(host, "x" * 3000, 8)
    assert len(conversation.turns) == 1


def test_the_hosts_datastore_is_drafted_from(host, tmp_path):
    store = Datastore.build(["abcabcabc " * 20], host.tokenizer, tmp_path / "store")
    race = Conversation().ask(Host(host.model, host.tokenizer, store), "abcabcabc", 8)
    assert race.sources == ["ReferenceCopy", "TokenRecycling", "DatastoreDrafts"]
    for _ in race.run():
        pass
    assert race.drafted.ids == race.plain.ids
