"""What cannot be answered gets an error in OpenAI's form that names it, and the server goes on."""

import json
import re
import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest
import requests
from huggingface_hub import ChatCompletionOutputMessage
from openai.types.chat import ParsedChatCompletionMessage
from openai.types.chat.chat_completion_chunk import ChoiceDelta

from hf_refspec.apps.serve.protocol import (
    UNSUPPORTED,
    ApiError,
    ChatRequest,
    CompletionRequest,
    parsed,
)
from tests.helpers.byte_model import changed
from tests.helpers.running_server import NAME, serving

MESSAGES = [{"role": "user", "content": "one"}]
CHAT = {"model": NAME, "messages": MESSAGES, "max_tokens": 4, "temperature": 0}


def refused(response: requests.Response, status: int = 400) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"]
    return error


@pytest.fixture(autouse=True)
def goes_on(server):
    yield
    assert server.post(json.dumps(CHAT)).status_code == 200
    assert server.engine.running == server.engine.waiting == 0


def json_schema(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


deep: dict = {}
for _ in range(100):
    deep = {"items": deep}
SCHEMA_TOO_DEEP = json_schema(deep)
SCHEMA_TOO_LARGE = json_schema({"enum": ["x" * 70_000]})
SCHEMA_INFINITE = json_schema({"properties": {"a": {"maximum": float("inf")}}})
PICTURE = {"type": "image_url", "image_url": {}}
CALLS = {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}
REFUSED = {
    "n": [0, 129, 100],
    "tools": [[{"type": "function"}], [{"type": "web_search"}]],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
    "response_format": [
        {"type": "xml"},
        {"type": "json_schema"},
        SCHEMA_TOO_DEEP,
        SCHEMA_TOO_LARGE,
        SCHEMA_INFINITE,
    ],
    "top_logprobs": [21, 2],
    "logit_bias": [{"x": 1}, {"5": 101}, {"-1": 1}, {"9999": 1}],
    "frequency_penalty": [2.1],
    "presence_penalty": [-3],
    "repetition_penalty": [0, 1000],
    "min_p": [1.5],
    "top_k": [-2],
    "audio": [{}],
    "best_of": [3],
    "echo": [True],
    "suffix": ["x"],
    "functions": [[{}]],
    "nonsense": [None],
    "temperature": [-1, 2.5, "hot"],
    "top_p": [1.5],
    "max_tokens": [0, 2.5],
    "seed": [2**63],
    "stop": ["", list("abcde")],
    "stream": ["perhaps"],
    "messages": [[], None, [{"role": "user"}], [{"role": "tool"}], [CALLS]],
    "chat_template_kwargs": ["x", {"enable_thinking": "no"}, {"chat_template": "x"}, deep],
    "prediction": ["a text", {"type": "content"}, {"type": "content", "content": "\udfff"}],
    "\ud800": [1],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in REFUSED for value in REFUSED[field]]
)
def test_a_field_that_is_not_supported_is_named(server, field, value):
    error = refused(server.post(json.dumps({**CHAT, field: value})))
    assert error["type"] == "invalid_request_error"
    if field != "\ud800":
        assert field in error["message"] and error["param"].split(".")[0] == field


@pytest.mark.parametrize(
    ("content", "place"), [(3, ""), (None, ""), ("\ud800", ""), ([PICTURE], ".0.type")]
)
def test_a_place_inside_of_a_message_is_named_in_the_requests_own_words(server, content, place):
    body = {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": content}]}
    error = refused(server.post(json.dumps(body)))
    assert error["param"] == f"messages.1.content{place}"
    assert error["message"].startswith(f"messages.1.content{place}: ")
    body = json.dumps({**CHAT, "stop": [""]})  # the message is that of the matching type
    assert "stop.0: String should have at least 1" in refused(server.post(body))["message"]


def calling(arguments, **others):
    function = {"name": "f", "arguments": arguments, **others}
    call = {"id": "123456789", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


FUNCTION = {"type": "function", "function": {"name": "f"}}
NESTED = {
    "messages.0.prefix": {"messages": [{**MESSAGES[0], "prefix": True}]},
    "messages.0.audio": {"messages": [{**MESSAGES[0], "audio": {"id": "1"}}]},
    "messages.0.content.0.foo": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x", "foo": 1}]}]
    },
    "messages.0.tool_calls.0.function.arguments": {"messages": [calling({"a": 1})]},
    "messages.0.tool_calls.0.function.foo": {"messages": [calling("{}", foo=1)]},
    "response_format.scheme": {"response_format": {"type": "json_object", "scheme": {}}},
    "response_format.schema": {"response_format": {"type": "text", "schema": {}}},
    "response_format.value": {
        "response_format": {"type": "json_object", "schema": {}, "value": {}}
    },
    "response_format.json_schema.foo": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "foo": 1}}
    },
    "tools.0.foo": {"tools": [{**FUNCTION, "foo": 1}]},
    "tools.0.function.input_schema": {
        "tools": [{"type": "function", "function": {"name": "f", "input_schema": {}}}]
    },
    "tool_choice.function.foo": {
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "function": {"name": "f", "foo": 1}},
    },
    "stream_options.foo": {"stream": True, "stream_options": {"foo": True}},
    "prediction.foo": {"prediction": {"type": "content", "content": "x", "foo": 1}},
    "messages.0.\\ud800": {"messages": [{**MESSAGES[0], "\ud800": 1}]},
}


@pytest.mark.parametrize("place", NESTED)
def test_a_field_inside_of_an_object_is_refused_by_its_place(server, place):
    error = refused(server.post(json.dumps({**CHAT, **NESTED[place]})))
    path, _, name = place.rpartition(".")
    assert error["param"] == place
    assert path in error["message"] and name in error["message"]


def sent_back() -> list[dict]:
    """An answer as OpenAI's client has it, whole, parsed and streamed, and as the Hub's has it."""
    whole = calling("{}")
    message = ParsedChatCompletionMessage.model_validate(whole | {"reasoning_content": "so"})
    call = {**whole["tool_calls"][0], "index": 0}
    delta = ChoiceDelta.model_validate({**whole, "tool_calls": [call]})
    of_hub = ChatCompletionOutputMessage.parse_obj_as_instance(whole)
    dumps = [
        each.model_dump(exclude_unset=unset) for each in (message, delta) for unset in (False, True)
    ]
    return [whole, *dumps, json.loads(json.dumps(of_hub)), {**MESSAGES[0], "name": "me"}]


@pytest.mark.parametrize("answer", sent_back())
def test_an_answer_can_be_sent_back_as_a_client_has_it(server, answer):
    result = {"role": "tool", "tool_call_id": "123456789", "content": "x"}
    body = {**CHAT, "messages": [*MESSAGES, answer, result]}
    assert server.post(json.dumps(body)).status_code == 200


def test_no_probabilities_where_a_completion_asks_for_none(server):
    for none in (False, None):
        body = json.dumps({"prompt": "x", "logprobs": none, "max_tokens": 2})
        assert server.post(body, "/completions").json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    "options",
    [
        {"n": 1, "logprobs": False, "tools": [], "response_format": {"type": "text"}},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        dict.fromkeys(["n", "stop", "seed", "top_p", "stream", "prediction", "tools"]),
        {"stream_options": None},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
    ],
)
def test_what_changes_nothing_is_taken(server, options):
    assert server.post(json.dumps({**CHAT, **options})).status_code == 200


BODIES = ["", "{", "nonsense", "[1, 2]", '"text"', "null", "7", json.dumps(CHAT)[:-1]]
BODIES += [b"\xff\xfe", b'{"messages": "\xff"}', '{"max_tokens": ' + "9" * 5000 + "}"]
BODIES += ["[" * 50_000, '{"a":' * 10_000 + "1" + "}" * 10_000]
BODIES += [json.dumps({**CHAT, "temperature": float("nan")})]
BODIES += [json.dumps({**CHAT, "temperature": 0}).replace("0", "1e999")]


@pytest.mark.parametrize("body", BODIES)
def test_a_body_that_is_no_request_is_refused(server, body):
    for path in ("/chat/completions", "/completions"):
        refused(server.post(body, path))


def test_the_documentation_lists_what_is_refused():
    text = (Path(__file__).parents[3] / "docs/tasks/serving.md").read_text()
    table = text.partition("## What is refused")[2].partition("\n## ")[0]
    assert {*re.findall(r"`(\w+)`", table)} >= UNSUPPORTED.keys()


@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/x-www-form-urlencoded"])
def test_json_of_another_type_is_read_but_not_a_pages(server, kind):
    """A page in a browser may send it to any server without asking first."""
    headers = {"Content-Type": kind}
    assert server.post(json.dumps(CHAT), **headers).status_code == 200
    refused(server.post("model=tiny", **headers))
    refused(server.post(json.dumps(CHAT), **headers, Origin="https://evil.example"))


def test_who_sends_no_key_is_refused_everywhere_but_at_the_health(speller, tokenizer):
    with serving(speller, tokenizer, keys=["s3cret", "größer"], hosts=None) as server:
        with pytest.raises(openai.AuthenticationError) as refusal:
            server.client.models.list()
        assert refusal.value.code == "invalid_api_key"
        for key in ("s3cret", "größer"):
            given = {"Authorization": f"Bearer {key}".encode()}
            assert server.post(json.dumps(CHAT), **given).status_code == 200
        for each in ("", "s3cret", "Bearer ", "Bearer s3cre", "Bearer s3crets", "Basic s3cret"):
            refused(server.post(json.dumps(CHAT), Authorization=each), 401)
        root = server.url.removesuffix("/v1")
        refused(requests.get(root + "/metrics", timeout=600), 401)
        assert requests.get(root + "/health", timeout=600).status_code == 200
        # A header that ends the address early.
        head = HEAD.replace(b"127.0.0.1", b"127.0.0.1:1/health?")
        assert b"invalid_api_key" in exchange(server, head + b"Content-Length: 0\r\n\r\n")


def test_pages_may_ask_from_the_named_origins_alone(server, speller, tokenizer):
    def allows(server, origin: str) -> bool:
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        answer = requests.options(server.url + "/models", headers=headers, timeout=600)
        return answer.headers.get("Access-Control-Allow-Origin") == origin

    page = "https://chat.example"
    assert not allows(server, page)
    with serving(speller, tokenizer, keys=["k"], origins=[page]) as open_to:
        assert allows(open_to, page) and not allows(open_to, "https://evil.example")
        error = open_to.post(json.dumps(CHAT), Origin=page)  # the page can read why
        assert refused(error, 401) and error.headers["Access-Control-Allow-Origin"] == page


def test_a_refused_request_is_logged_without_its_text(server, caplog):
    caplog.set_level("INFO", "hf_refspec")
    fields = {"temperature": "text", "text": 1, "logit_bias": {"text": 1}, "model": "text"}
    for field, value in fields.items():
        server.post(json.dumps({**CHAT, field: value}))
    server.post('"text"')
    requests.get(f"{server.url}/text", timeout=600)
    whys = ["400, temperature", "400, unknown_parameter", "400, logit_bias", "404, model_not_found"]
    chats = [f"/v1/chat/completions, {why}" for why in (*whys, "400, Bad Request")]
    logged = [each.getMessage() for each in caplog.records if "refused" in each.getMessage()]
    assert logged == [f"refused: {each}" for each in (*chats, "no route, 404, Not Found")]


PROMPTS = [("", "empty"), ([], "prompt"), (["a", ""], "empty"), ([[1, 2], []], "empty")]
PROMPTS += [(["a", [1]], "prompt"), ([[[1]]], "prompt"), ([1.5], "prompt")]
PROMPTS += [(["a"] * 129, "at most 128 prompts"), (["a"] * 128, "prompt: this server takes")]
PROMPTS += [(ids, "from 0 to 258") for ids in ([5, 10_000], [-1], [2**70])]
PROMPTS += [("x" * 3000, "3,000 tokens, and the model's context holds 2,048")]
PROMPTS += [("x" * 90_000, "90,000 characters, and the model's context holds 2,048")]


@pytest.mark.parametrize(("prompt", "message"), PROMPTS)
def test_a_prompt_that_cannot_be_continued_is_refused(server, prompt, message):
    error = refused(server.post(json.dumps({"prompt": prompt}), "/completions"))
    assert message in error["message"] and error["param"].startswith("prompt")


LONG = "x" * 3000
TOO_LONG = [
    {"messages": [{"role": "user", "content": LONG}]},
    {"prediction": {"type": "content", "content": LONG}},
]


@pytest.mark.parametrize("long", TOO_LONG, ids=["messages", "prediction"])
def test_what_is_longer_than_the_context_is_refused_with_both_lengths(server, long):
    error = refused(server.post(json.dumps({**CHAT, **long})))
    assert re.search(r"3,0\d\d tokens.*2,048", error["message"]) and error["param"] in long
    assert error["code"] == "context_length_exceeded"


def test_other_paths_and_methods_are_not_found_and_counted(server):
    before = server.outcomes("refused")
    refused(requests.get(server.url + "/nonsense", timeout=600), 404)
    refused(requests.get(server.url + "/chat/completions", timeout=600), 405)
    assert server.outcomes("refused") == before + 2


def test_a_model_without_a_chat_template_refuses_chats_and_completes_prompts(
    speller, tokenizer, plain
):
    with serving(speller, changed(tokenizer, chat_template=None)) as server:
        assert "/v1/completions" in refused(server.post(json.dumps(CHAT)))["message"]
        body = {"prompt": "a", "max_tokens": 4, "temperature": 0}
        answer = server.post(json.dumps(body), "/completions").json()
        assert answer["choices"][0]["text"] == plain(prompt="a", max_new_tokens=4)


def test_what_a_template_does_not_take_is_refused(speller, tokenizer):
    strict = changed(tokenizer, chat_template="{{ raise_exception('users only') }}")
    with serving(speller, strict) as server:
        assert "users only" in refused(server.post(json.dumps(CHAT)))["message"]
    counting = changed(tokenizer, chat_template="{% for i in range(n) %}{% endfor %}")
    with serving(speller, counting) as server:
        for options in ({"n": "x"}, {"n": 10**9}, {"messages": []}):
            body = json.dumps({**CHAT, "chat_template_kwargs": options})
            assert "chat_template_kwargs" in refused(server.post(body))["message"]


def exchange(server, request: bytes) -> bytes:
    """Sends bytes, and reads what comes until the connection is closed."""
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=600) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\n"
)


def test_a_body_that_is_too_large_is_refused_also_where_its_length_is_not_announced(server):
    error = refused(server.post(json.dumps({**CHAT, "user": "x" * 100_000})), 413)
    assert "100,000 bytes" in error["message"]
    chunk = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
    body = (
        b"Transfer-Encoding: chunked\r\n\r\n"
        + 3 * chunk
        + b"800\r\n"
        + b"x" * 0x800
        + b"\r\n0\r\n\r\n"
    )
    answer = exchange(server, HEAD + body)
    assert answer.startswith(b"HTTP/1.1 413") and b"100,000 bytes" in answer


def test_a_page_that_points_its_own_name_at_this_machine_is_refused(server):
    """DNS rebinding."""
    response = server.post(json.dumps(CHAT), Host="evil.example")
    assert response.status_code == 400 and "choices" not in response.text


USER = {"role": "user", "content": "x"}
MOST = 260_000  # numbers that a body may just hold
MILLIONS = [f'{{"metadata":[{",".join([unit] * 600_000)}]}}' for unit in ("[]", "{}", '""', "0")]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {"messages": [0] * MOST}),
        (ChatRequest, {"messages": [{}] * (MOST // 2)}),
        (ChatRequest, {"messages": [{"role": "user", "content": [0] * MOST}]}),
        (CompletionRequest, {"prompt": [{}] * (MOST // 2)}),
        (ChatRequest, {"messages": [], **dict.fromkeys(map(str, range(MOST // 2)), 0)}),
    ],
    ids=["messages", "objects", "content", "prompt", "fields"],
)
def test_a_body_of_mistakes_is_not_read_beyond_the_first(kind, body):
    with pytest.raises(ApiError) as refusal:
        parsed(kind, json.dumps(body, separators=(",", ":")).encode())
    cause = refusal.value.__cause__
    assert refusal.value.status_code == 400
    assert cause is None or cause.error_count() < 8  # one for each type of a field


def test_a_body_of_millions_of_parts_is_not_read():
    for body in (*MILLIONS, '"' * (4 << 20)):
        with pytest.raises(ApiError, match="more than 262,144 strings, brackets and") as refusal:
            parsed(ChatRequest, body.encode())
        assert refusal.value.status_code == 413


def test_what_stands_in_a_text_is_not_counted():
    text = '[{,"a\\' * 300_000
    assert parsed(CompletionRequest, json.dumps({"prompt": text}).encode()).prompt == text


@pytest.mark.parametrize("parts", [{"type": "text", "text": ""}, None])
def test_a_list_has_a_limit_where_a_request_may_have_one(parts):
    body = {"messages": [USER] * 3000 if parts is None else [{**USER, "content": [parts] * 3000}]}
    with pytest.raises(ApiError, match="at most 2048 items"):
        parsed(ChatRequest, json.dumps(body).encode())


def test_numbers_of_any_length_are_read_at_once():
    digits = "9" * 4000
    numbers = f'"max_tokens":{digits},"metadata":[{",".join([digits] * 900)}]'
    body = f'{{"messages":[{json.dumps(USER)}],{numbers}}}'
    assert (parsed(ChatRequest, body.encode()).max_tokens or 0) > 10**39


@pytest.mark.parametrize("name", ["x" * 3_000_000, "\ud800", "a\nb", ""])
def test_the_name_of_an_unknown_field_is_repeated_in_short(name):
    with pytest.raises(ApiError, match="is not a field") as refusal:
        parsed(ChatRequest, json.dumps({**CHAT, name: 1}).encode())
    assert len(refusal.value.detail) < 120 and "\n" not in refusal.value.detail


HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX"


def test_too_many_clients_get_503_until_others_leave(speller, tokenizer):
    with serving(speller, tokenizer, connections=4) as server:
        parts = urlsplit(server.url)
        health = f"http://{parts.netloc}/health"
        with ExitStack() as connections:
            for _ in range(4):
                connection = socket.create_connection((parts.hostname, parts.port), timeout=600)
                connections.enter_context(connection).sendall(HALF)
            assert requests.get(health, timeout=600).status_code == 503
        while requests.get(health, timeout=600).status_code == 503:
            pass
