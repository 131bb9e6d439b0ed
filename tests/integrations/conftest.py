"""The default model under other people's code, plainly and with a drafter attached."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

import hf_refspec as rs
from tests.helpers.passes import passes_of

DOCUMENT = (
    "The Harbour Museum was built in 1894 as a customs house. It is open every day from ten in the "
    "morning to six in the evening. Tickets cost 9 euros for adults and 4 euros for children."
)


@pytest.fixture(scope="session")
def trained_tokenizer(loaded):
    tokenizer = loaded[1]
    tokenizer.padding_side = "left"
    return tokenizer


@pytest.fixture(scope="session")
def trained_model(loaded, trained_tokenizer):
    """Probed, so that its forward passes are those of the calls."""
    model = loaded[0]
    for texts in (["one two one two one"], ["one two one two one", "one two"]):
        inputs = trained_tokenizer(texts, return_tensors="pt", padding=True)
        # Something must be drafted.
        model.generate(**inputs, max_new_tokens=8, candidate_generator="auto", max_draft_tokens=8)
    return model


@pytest.fixture(scope="session")
def messages() -> list[list[dict[str, str]]]:
    """Three chats about a document, whose answers repeat much of it."""
    questions = (
        "When is the museum open? Quote the text.",
        "What do tickets cost? Quote the text.",
        "Repeat the first sentence of the text.",
    )
    return [[{"role": "user", "content": f"{DOCUMENT}\n\n{question}"}] for question in questions]


@pytest.fixture(scope="session")
def prompts(trained_tokenizer, messages) -> list[str]:
    """The chats as texts."""
    options = {"tokenize": False, "add_generation_prompt": True}
    return [trained_tokenizer.apply_chat_template(chat, **options) for chat in messages]


@pytest.fixture
def drafted_as_plain(trained_model):
    """Calls a function plainly and then with a drafter attached, asserts that it returns the same
    from fewer forward passes of the model, and returns it."""

    def called_twice(call: Callable[[], Any]) -> Any:
        with passes_of(trained_model) as plainly:
            expected = finished(call)
        # The number of nodes is fixed: how many pay depends on the machine.
        with (
            rs.attach(trained_model, max_draft_tokens=8) as attachment,
            passes_of(trained_model) as drafted,
        ):
            assert finished(call) == expected
        assert attachment.stats.accepted > 0
        assert attachment.stats.forward_passes <= len(drafted) < len(plainly)
        return expected

    return called_twice


def finished(call: Callable[[], Any]) -> Any:
    """Its result, once its threads have ended: a stream ends before `generate` returns."""
    before = threading.enumerate()
    returned = call()
    for thread in threading.enumerate():
        waits = thread.daemon or thread.name.startswith("ThreadPoolExecutor")  # for more to do
        if thread not in before and not waits:
            thread.join(60)
    return returned
