"""Clients that nobody here wrote ask a real server process for calls and for objects."""

from __future__ import annotations

from functools import partial
from typing import Literal

import openai
import pytest
from pydantic import BaseModel
from running_server import server_process

pytest.importorskip("llguidance")
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
QUESTION = "Anna is 31 years old and human. Extract her data as JSON."
WEATHER = "What is the weather in Paris?"


class Person(BaseModel):
    name: str
    age: int
    kind: Literal["human", "robot"]


class GetWeather(BaseModel):
    """Weather of a city."""

    city: str


ANNA = Person(name="Anna", age=31, kind="human")
LIMITS = {"max_tokens": 200, "temperature": 0}


@pytest.fixture(scope="module")
def url():
    with server_process("--max-rows", 2) as (_, address, _):
        yield address


def completions(url: str):
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=600)
    return client.chat.completions


def of_openai(url: str) -> Person | None:
    messages = [{"role": "user", "content": QUESTION}]
    options = {"model": NAME, "messages": messages, **LIMITS}
    return completions(url).parse(response_format=Person, **options).choices[0].message.parsed


def of_langchain(url: str, method: str) -> Person:
    return langchain(url).with_structured_output(Person, method=method).invoke(QUESTION)


def of_pydantic_ai(url: str) -> Person:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=url, api_key="none")
    model = models.OpenAIChatModel(NAME, provider=provider)
    agent = pydantic_ai.Agent(model, output_type=Person, model_settings=LIMITS)
    return agent.run_sync(QUESTION).output


def langchain(url: str):
    langchain_openai = pytest.importorskip("langchain_openai")
    return langchain_openai.ChatOpenAI(base_url=url, api_key="none", model=NAME, **LIMITS)


@pytest.mark.parametrize(
    "asked",
    [
        of_openai,
        partial(of_langchain, method="json_schema"),
        partial(of_langchain, method="function_calling"),
        of_pydantic_ai,
    ],
)
def test_clients_have_objects(url, asked):
    assert asked(url) == ANNA


def test_openai_parses_streams_of_calls(url):
    with completions(url).stream(
        model=NAME,
        messages=[{"role": "user", "content": WEATHER}],
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice="required",
        parallel_tool_calls=False,
        **LIMITS,
    ) as stream:
        choice = stream.get_final_completion().choices[0]
    [call] = choice.message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city="Paris")
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("streams", [False, True])
def test_langchain_binds_tools(url, streams):
    bound = langchain(url).bind_tools([GetWeather], tool_choice="GetWeather")
    chunks = [*bound.stream(WEATHER)] if streams else [bound.invoke(WEATHER)]
    answer = chunks[0]
    for chunk in chunks[1:]:
        answer = answer + chunk
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("GetWeather", {"city": "Paris"})
