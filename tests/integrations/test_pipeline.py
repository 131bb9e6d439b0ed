"""`pipeline("text-generation")` with a trained model; see also tests/test_call_sites.py."""

from __future__ import annotations

import threading

import pytest
from transformers import TextIteratorStreamer, pipeline

OPTIONS = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def generator(trained_model, trained_tokenizer):
    return pipeline(
        "text-generation", model=trained_model, tokenizer=trained_tokenizer, device="cpu"
    )


def test_chats_in_batches(generator, messages, drafted_as_plain):
    chats = drafted_as_plain(lambda: generator(messages, batch_size=2, **OPTIONS))
    assert [chat["generated_text"][:-1] for [chat] in chats] == messages
    assert all(chat["generated_text"][-1]["content"] for [chat] in chats)


def test_a_streamed_chat(generator, trained_tokenizer, messages, drafted_as_plain):
    def streamed() -> list[str]:
        streamer = TextIteratorStreamer(trained_tokenizer, skip_prompt=True, timeout=60)
        kwargs = {"streamer": streamer, **OPTIONS}
        thread = threading.Thread(target=generator, args=(messages[0],), kwargs=kwargs)
        thread.start()
        parts = list(streamer)
        thread.join()
        return parts

    assert len(drafted_as_plain(streamed)) > 1
