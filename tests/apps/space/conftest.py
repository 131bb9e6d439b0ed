from __future__ import annotations

import huggingface_hub
import pytest
from hub_server import TOKEN, running_hub
from huggingface_hub import constants

from hf_refspec import Datastore
from hf_refspec.apps.space.conversation import Conversation, Host


@pytest.fixture(scope="session")
def host(byte_llama, tokenizer) -> Host:
    """A tiny random model that soon repeats itself."""
    return Host(byte_llama, tokenizer)


@pytest.fixture(scope="session")
def store(tmp_path_factory, tokenizer) -> str:
    """The folder of a small datastore."""
    folder = tmp_path_factory.mktemp("stores") / "store"
    Datastore.build(["abcabcabc " * 20], tokenizer, folder)
    return str(folder)


@pytest.fixture
def run(host):
    """Asks in a conversation and runs the race to its end; returns the race."""

    def asked(message, conversation=None, datastore="", max_new_tokens=40):
        conversation = Conversation() if conversation is None else conversation
        race = conversation.ask(host, message, datastore, max_new_tokens)
        for _ in race.run():
            pass
        return race

    return asked


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that huggingface_hub takes for the real one, whose owner is logged in."""
    with running_hub() as server:
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
        huggingface_hub.close_session()
