"""A conversation goes on with its document and its answers, and refuses what cannot be."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_refspec.apps.shared.prompts import chat_inputs, user
from hf_refspec.apps.space.conversation import Conversation, Host


def prompt_of(conversation, host, monkeypatch, message) -> str:
    seen = []
    monkeypatch.setattr(
        "hf_refspec.apps.space.conversation.chat_inputs",
        lambda tokenizer, messages: seen.append(messages) or chat_inputs(tokenizer, messages),
    )
    conversation.ask(host, message, "", 8)
    return [message["content"] for message in seen[0]]


def test_the_document_stands_before_the_first_message_and_answers_stay(host, run, monkeypatch):
    conversation = Conversation("a text\n")
    first = run("one", conversation, max_new_tokens=8)
    said = prompt_of(conversation, host, monkeypatch, "two")
    assert said == ["a text\n\none", first.drafted.text, "two"]


def test_drafts_learn_from_the_answers_before(run):
    conversation = Conversation()
    first, again = run("abcabc", conversation), run("abcabc", conversation)
    assert again.drafted.ids == again.plain.ids
    assert again.drafted.mat > first.drafted.mat


@pytest.mark.parametrize("message", ["", "  \n"])
def test_an_empty_message_is_refused(host, message):
    conversation = Conversation()
    with pytest.raises(ValueError, match="the message is empty"):
        conversation.ask(host, message, "", 8)
    assert conversation.turns == []


def test_what_is_too_long_is_refused_with_both_lengths(host, run):
    with pytest.raises(ValueError, match=r"the message with its document has 3,\d\d\d .* 2,048"):
        Conversation("x" * 3000).ask(host, "one", "", 8)
    conversation = Conversation()
    run("one", conversation, max_new_tokens=8)
    with pytest.raises(ValueError, match=r"the conversation has .* begin a new one"):
        conversation.ask(host, "x" * 3000, "", 8)
    assert len(conversation.turns) == 1


def test_an_answer_gets_as_many_tokens_as_fit(host):
    inputs = chat_inputs(host.tokenizer, [user("x")])
    message = "x" * (2048 - inputs["input_ids"].shape[1] + 1 - 5)
    assert Conversation().ask(host, message, "", 40).max_new_tokens == 5


def test_the_hosts_own_datastore_may_be_a_folder(host, store):
    own = Host(host.model, host.tokenizer, store)
    race = Conversation().ask(own, "abcabcabc", f" {store} ", 8)
    assert race.sources == ["ReferenceCopy", "TokenRecycling", "DatastoreDrafts"]
    for _ in race.run():
        pass
    assert race.drafted.ids == race.plain.ids


def test_another_datastore_is_drafted_from_in_the_same_conversation(host, store, run):
    own = Host(host.model, host.tokenizer, store)
    conversation = Conversation()
    assert len(conversation.ask(own, "one", "", 8).sources) == 2
    assert len(conversation.ask(own, "two", store, 8).sources) == 3


def test_a_datastore_of_another_tokenizer_is_refused(host, store):
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    other = Host(host.model, PreTrainedTokenizerFast(tokenizer_object=words), store)
    with pytest.raises(ValueError, match="tokenizer"):
        other.drafter(store)
