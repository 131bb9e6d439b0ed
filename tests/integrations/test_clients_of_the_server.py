"""Clients that nobody here wrote ask a server for calls and for objects; all but OpenAI's in
`scripts/test --nightly`."""

from functools import partial
from typing import Literal

import openai
import pytest
from huggingface_hub import InferenceClient
from pydantic import BaseModel

from tests.helpers.running_server import forked_server

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
nightly = partial(pytest.param, marks=pytest.mark.nightly)


@pytest.fixture(scope="module")
def url():
    with forked_server("--max-rows", 2) as (address, _):
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


def pydantic_ai_agent(url: str):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=url, api_key="none")
    model = models.OpenAIChatModel(NAME, provider=provider)
    return pydantic_ai.Agent(model, output_type=Person, model_settings=LIMITS)


def of_pydantic_ai(url: str) -> Person:
    return pydantic_ai_agent(url).run_sync(QUESTION).output


def of_huggingface_hub(url: str) -> Person:
    """It sends the schema in the form of TGI to servers that it does not know."""
    schema = {"name": "person", "schema": Person.model_json_schema(), "strict": True}
    answer = InferenceClient(base_url=url).chat_completion(
        [{"role": "user", "content": QUESTION}],
        model=NAME,
        response_format={"type": "json_schema", "json_schema": schema},
        **LIMITS,
    )
    return Person.model_validate_json(answer.choices[0].message.content)


def langchain(url: str):
    langchain_openai = pytest.importorskip("langchain_openai")
    return langchain_openai.ChatOpenAI(base_url=url, api_key="none", model=NAME, **LIMITS)


@pytest.mark.parametrize(
    "asked",
    [
        of_openai,
        nightly(partial(of_langchain, method="json_schema")),
        nightly(partial(of_langchain, method="function_calling")),
        nightly(of_pydantic_ai),
        nightly(of_huggingface_hub),
    ],
)
def test_clients_have_objects(url, asked):
    assert asked(url) == ANNA


def history_of_openai(url: str):
    tools = [openai.pydantic_function_tool(GetWeather)]
    options = {"model": NAME, "tools": tools, "tool_choice": "required", **LIMITS}
    messages = [{"role": "user", "content": WEATHER}]
    message = completions(url).parse(messages=messages, **options).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    for sent in (message, message.model_dump()):
        answer = completions(url).parse(messages=[*messages, sent, result], **options)
    return {call.function.name for call in answer.choices[0].message.tool_calls}


def history_of_langchain(url: str):
    messages = pytest.importorskip("langchain_core.messages")
    bound = langchain(url).bind_tools([GetWeather], tool_choice="GetWeather", strict=True)
    asked = messages.HumanMessage(WEATHER, name="me")
    answer = bound.invoke([asked])
    result = messages.ToolMessage("sunny", tool_call_id=answer.tool_calls[0]["id"])
    return {call["name"] for call in bound.invoke([asked, answer, result]).tool_calls}


def history_of_pydantic_ai(url: str):
    agent = pydantic_ai_agent(url)
    first = agent.run_sync(QUESTION)
    return agent.run_sync(QUESTION, message_history=first.all_messages()).output


@pytest.mark.parametrize(
    ("go_on", "expected"),
    [
        (history_of_openai, {"GetWeather"}),
        nightly(history_of_langchain, {"GetWeather"}),
        nightly(history_of_pydantic_ai, ANNA),
    ],
)
def test_clients_send_answers_back(url, go_on, expected):
    assert go_on(url) == expected


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


@pytest.mark.nightly
@pytest.mark.parametrize("streams", [False, True])
def test_langchain_binds_tools(url, streams):
    bound = langchain(url).bind_tools([GetWeather], tool_choice="GetWeather")
    chunks = [*bound.stream(WEATHER)] if streams else [bound.invoke(WEATHER)]
    answer = chunks[0]
    for chunk in chunks[1:]:
        answer = answer + chunk
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("GetWeather", {"city": "Paris"})
