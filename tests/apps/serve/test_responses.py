"""`/v1/responses`, by OpenAI's own client."""

from __future__ import annotations

import pytest
from running_server import NAME

OPTIONS = {"model": NAME, "input": "one", "temperature": 0, "max_output_tokens": 32}


def test_an_answer_that_ends_at_its_limit_is_incomplete_as_openais(server, plain):
    response = server.client.responses.create(**OPTIONS)
    assert response.output_text == plain("one")
    assert (response.status, response.output[0].status) == ("incomplete", "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 32


def test_the_stream_of_an_incomplete_answer_ends_with_its_own_event(server, plain):
    with server.client.responses.stream(**OPTIONS) as stream:
        events = list(stream)
        with pytest.raises(RuntimeError, match=r"response\.completed"):  # with OpenAI's servers too
            stream.get_final_response()
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == plain("one")
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"
    assert [event.sequence_number for event in events] == [*range(len(events))]


def test_messages_and_instructions_are_those_of_a_chat(server):
    chat = server.client.chat.completions.create(
        model=NAME, temperature=0, max_tokens=16,
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}],
    )  # fmt: skip
    message = {"role": "user", "content": [{"type": "input_text", "text": "one"}]}
    asked = {**OPTIONS, "max_output_tokens": 16}
    for given in ("one", [message]):
        response = server.client.responses.create(
            **{**asked, "input": given}, instructions="be brief"
        )
        assert response.output_text == chat.choices[0].message.content
        assert response.usage.input_tokens == chat.usage.prompt_tokens
