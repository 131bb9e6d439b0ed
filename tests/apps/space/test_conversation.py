"""A conversation goes on with its document and its answers, and refuses what cannot be answered;
races wait in line."""

from __future__ import annotations

import pytest
from huggingface_hub import constants

from hf_refspec import Datastore
from hf_refspec.apps.shared.prompts import assistant, chat_inputs, user
from hf_refspec.apps.space.conversation import Conversation, Host, python_datastores


def test_the_document_stands_before_the_first_message_and_answers_stay(host, run):
    conversation = Conversation("a text\n")
    first, second = (run(message, conversation, max_new_tokens=8) for message in ("one", "two"))
    assert first.drafter is second.drafter  # which learns from one answer for the next
    messages = [user("a text\n\none"), assistant(first.drafted.text), user("two")]
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
    conversation = Conversation(document)
    with pytest.raises(ValueError, match=error):
        conversation.ask(host, message, 8)
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


def test_a_small_datastore_is_built_once_for_rest_and_crest(host, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    choices = python_datastores(host.tokenizer)
    assert [store.form for store in choices] == ["full", "compact"]
    assert choices[0].config.source["corpus"] == "Python standard library"
    built = (choices[0].path / "config.json").stat()
    (again, _) = python_datastores(host.tokenizer)
    assert (again.path / "config.json").stat() == built
    sources = Host(host.model, host.tokenizer, choices=[again, choices[1]]).sources()
    assert list(sources) == ["auto", "REST", "CREST"]
    assert sources["REST"][0].published and sources["CREST"][0].store is choices[1]
    assert choices[1].config.ngrams.ngrams[1:] == [2000, 2000]
    given = Host(host.model, host.tokenizer, choices[1], choices=choices[1:]).sources()
    assert list(given) == ["auto", "compact"]
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "file"))
    assert python_datastores(host.tokenizer) == []
    assert "no drafts by REST and CREST" in caplog.text


def test_races_run_in_the_order_in_which_they_came(host):
    first, second, third = (Conversation().ask(host, "abc", 8) for _ in range(3))
    with host.place_in_line(second):
        with host.place_in_line(first):
            assert host.wait(second) == ""
            assert host.wait(first) == "1 answer comes before yours."
            with host.place_in_line(third):
                assert host.wait(third) == "2 answers come before yours."
        with host.place_in_line(third):
            assert host.wait(third) == "1 answer comes before yours."
