import pytest

from hf_refspec.apps.space.conversation import Conversation, Host


@pytest.fixture(autouse=True)
def eight_nodes(monkeypatch):
    """What passes take beside other tests must not decide whether anything is drafted."""
    named = "hf_refspec.generation.speculate.make_budget"
    monkeypatch.setattr(named, lambda *_, **__: 8)


@pytest.fixture(scope="session")
def host(byte_llama, tokenizer) -> Host:
    """A tiny random model that soon repeats itself."""
    return Host(byte_llama, tokenizer)


@pytest.fixture
def run(host):
    """Asks in a conversation and runs the race to its end; returns the race."""

    def asked(message, conversation=None, max_new_tokens=40, document=""):
        conversation = Conversation() if conversation is None else conversation
        race = conversation.ask(host, message, max_new_tokens, document)
        for _ in race.run():
            pass
        return race

    return asked
