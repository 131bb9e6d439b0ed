"""A body is measured before it is read, and whatever it holds, the server answers others."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import pytest
import requests
from running_server import RunningServer, serving

from hf_refspec.apps.serve.errors import ApiError
from hf_refspec.apps.serve.parsing import parsed
from hf_refspec.apps.serve.protocol import ChatRequest, CompletionRequest

USER = '{"role":"user","content":"x"}'
MOST = 260_000  # numbers that a body may just hold


@pytest.fixture(scope="module")
def roomy(speller, tokenizer):
    with serving(speller, tokenizer, max_body_bytes=4 << 20) as server:
        yield server


def longest_wait(server: RunningServer, request: Callable[[], object]) -> float:
    """How much this process computed at most while `/health` waited and a request was answered, in
    seconds: a busy machine takes longer, and does not compute more."""
    url, waits = server.url.removesuffix("/v1") + "/health", []
    ended = threading.Event()

    def poll() -> None:
        while not ended.is_set():
            began = time.process_time()
            requests.get(url, timeout=60)
            waits.append(time.process_time() - began)

    polling = threading.Thread(target=poll)
    polling.start()
    try:
        request()
    finally:
        ended.set()
        polling.join()
    return max(waits)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", f'{{"messages":[{",".join(["0"] * MOST)}]}}'),
        ("/chat/completions", f'{{"messages":[{",".join(["{}"] * (MOST // 2))}]}}'),
        (
            "/chat/completions",
            f'{{"messages":[{{"role":"user","content":[{",".join("0" * MOST)}]}}]}}',
        ),
        ("/completions", f'{{"prompt":[{",".join(["[]"] * (MOST // 2))}]}}'),
        (
            "/chat/completions",
            json.dumps({"messages": [], **dict.fromkeys(map(str, range(MOST // 2)), 0)}),
        ),
    ],
    ids=["messages", "objects", "content", "prompt", "fields"],
)
def test_health_is_answered_while_a_body_of_mistakes_is_refused(roomy, path, body):
    def refused() -> None:
        assert roomy.post(body, path).status_code == 400

    assert longest_wait(roomy, refused) < 0.5


def test_a_body_of_millions_of_parts_is_not_read(roomy):
    for unit in ("[]", "{}", '""', "0"):
        response = roomy.post(f'{{"metadata":[{",".join([unit] * 600_000)}]}}')
        assert response.status_code == 413
        assert "more than 262,144 strings, brackets and commas" in response.text
    assert roomy.post('"' * (4 << 20)).status_code == 413


def test_what_stands_in_a_text_is_not_counted():
    text = '[{,"a\\' * 300_000
    assert parsed(CompletionRequest, json.dumps({"prompt": text}).encode()).prompt == text


def test_a_list_has_a_limit_where_a_request_may_have_one():
    message = {"role": "user", "content": "x"}
    many = {"messages": [message] * 3000}
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 3000}]}
    for body in (many, parts):
        with pytest.raises(ApiError, match="at most 2048 items"):
            parsed(ChatRequest, json.dumps(body).encode())


def test_numbers_of_any_length_are_read_at_once():
    digits = "9" * 4000
    body = f'{{"messages":[{USER}],"max_tokens":{digits},"metadata":[{",".join([digits] * 900)}]}}'
    assert (parsed(ChatRequest, body.encode()).max_tokens or 0) > 10**39


@pytest.mark.parametrize("name", ["x" * 3_000_000, "\ud800", "a\nb", ""])
def test_the_name_of_an_unknown_field_is_repeated_in_short(name):
    with pytest.raises(ApiError, match="there is no field") as refusal:
        parsed(ChatRequest, json.dumps({"messages": [], name: 1}).encode())
    assert len(refusal.value.detail) < 120 and "\n" not in refusal.value.detail
