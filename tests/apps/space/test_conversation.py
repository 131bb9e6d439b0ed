"""A conversation goes on with its document and its answers, and refuses what cannot be answered; a
race is two real calls of generate() in turns, and each text is plain generate()'s."""

import threading

import pytest

from hf_refspec import Datastore
from hf_refspec.apps.shared.prompts import chat_inputs, chat_messages, user
from hf_refspec.apps.shared.streams import LiveDrafts
from hf_refspec.apps.space.conversation import Conversation, Host, Race
from hf_refspec.drafting.auto import default_sources
from hf_refspec.drafting.contract import Drafter


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


@pytest.fixture
def race(host):
    def new(message="abcabcabc", max_new_tokens=40, sources=None) -> Race:
        drafter = LiveDrafts(sources or default_sources())
        inputs = chat_inputs(host.tokenizer, [user(message)])
        return Race(host.model, host.tokenizer, inputs, max_new_tokens, drafter)

    return new


def finish(race: Race) -> Race:
    for _ in race.run():
        pass
    return race


def lane_threads() -> int:
    return sum(thread.name.startswith("Lane") for thread in threading.enumerate())


def test_both_texts_are_plain_generates_and_figures_and_owners_the_drafted_calls(race, host):
    ran = finish(race())
    inputs = chat_inputs(host.tokenizer, [user("abcabcabc")])
    output = host.model.generate(**inputs, max_new_tokens=40, do_sample=False)
    ids = output[0, inputs["input_ids"].shape[1] :].tolist()
    assert ran.plain.ids == ran.drafted.ids == ids
    assert [token for step in ran.passes for token in step.tokens] == ids
    assert ran.plain.text == ran.drafted.text == host.tokenizer.decode(ids, True)
    assert ran.completed and ran.first_difference() is None
    assert ran.plain.passes == len(ran.plain.ids) == 40 and ran.plain.mat == 1
    assert ran.drafted.passes == len(ran.passes) < 40 and ran.drafted.mat > 1
    assert ran.sources == ["ReferenceCopy", "TokenRecycling"]
    owners = [owner for _, owner in ran.drafted.pieces[:40]]
    assert owners == [owner for step in ran.passes for owner in step.owners]
    assert owners.count(None) == ran.drafted.passes  # one token of each is the target's own
    assert all(owner is None for _, owner in ran.plain.pieces)
    for step in ran.passes:
        assert step.tree.tokens[step.accepted()].tolist() == step.tokens[:-1]


def test_the_call_whose_clock_is_behind_computes_and_the_other_waits(race):
    new = race()
    lanes = [new.plain, new.drafted]
    before = [(0.0, 0, False)] * 2
    for _ in new.run():
        after = [(lane.seconds, lane.passes, lane.finished) for lane in lanes]
        (computed,) = (i for i in range(2) if after[i] != before[i])
        other = before[1 - computed]
        assert after[computed][0] > before[computed][0]
        assert after[computed][1] - before[computed][1] == (not after[computed][2])
        assert before[computed][0] <= other[0] or other[2]
        before = after
    assert new.speedup == new.drafted.rate / new.plain.rate


def test_a_stopped_race_ends_both_calls_and_the_drafter_can_be_used_again(race, host):
    new = race()
    for count, _ in enumerate(new.run()):
        if count == 9:
            new.stop()
    assert new.finished and not new.completed
    assert 0 < len(new.plain.ids) < 40 and new.first_difference() is None
    assert lane_threads() == 0
    inputs = chat_inputs(host.tokenizer, [user("abcabcabc")])
    again = finish(Race(host.model, host.tokenizer, inputs, 8, new.drafter))
    assert again.completed and again.drafted.ids == again.plain.ids


def test_a_race_that_nobody_watches_any_more_ends(race):
    watched = race().run()
    next(watched), next(watched)
    assert lane_threads() == 2
    watched.close()
    assert lane_threads() == 0


def test_an_error_in_one_call_is_raised_and_ends_the_other(race):
    class Broken(Drafter):
        def draft(self, budget, call):
            raise ValueError("broken drafter")

    new = race(sources=[Broken()])
    with pytest.raises(ValueError, match="broken drafter"):
        finish(new)
    assert lane_threads() == 0 and new.plain.finished
