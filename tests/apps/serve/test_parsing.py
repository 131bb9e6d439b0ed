"""A body is measured before it is read, and whatever it holds, the server answers others."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from running_server import serving

from hf_refspec.apps.serve import app
from hf_refspec.apps.serve.app import Reader
from hf_refspec.apps.serve.errors import ApiError
from hf_refspec.apps.serve.protocol import ChatRequest, CompletionRequest, parsed

USER = {"role": "user", "content": "x"}
MOST = 260_000  # numbers that a body may just hold


@pytest.fixture(scope="module")
def roomy(speller, tokenizer):
    with serving(speller, tokenizer, max_body_bytes=4 << 20) as server:
        yield server


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {"messages": [0] * MOST}),
        (ChatRequest, {"messages": [{}] * (MOST // 2)}),
        (ChatRequest, {"messages": [{"role": "user", "content": [0] * MOST}]}),
        (CompletionRequest, {"prompt": [[]] * (MOST // 2)}),
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


def test_a_body_of_millions_of_parts_is_not_read(roomy):
    for unit in ("[]", "{}", '""', "0"):
        response = roomy.post(f'{{"metadata":[{",".join([unit] * 600_000)}]}}')
        assert response.status_code == 413
        assert "more than 262,144 strings, brackets and commas" in response.text
    assert roomy.post('"' * (4 << 20)).status_code == 413


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
    with pytest.raises(ApiError, match="there is no field") as refusal:
        parsed(ChatRequest, json.dumps({"messages": [], name: 1}).encode())
    assert len(refusal.value.detail) < 120 and "\n" not in refusal.value.detail


def test_when_too_many_wait_to_be_read_the_next_is_refused(monkeypatch):
    monkeypatch.setattr(app, "_MOST_UNREAD", 2)
    may_end = threading.Event()

    def wait(body: bytes) -> bytes:
        assert may_end.wait(60)
        return body

    async def ask() -> None:
        reader = Reader()
        tasks = [asyncio.create_task(reader.read(wait, body)) for body in (b"a", b"b")]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="2 requests wait") as refusal:
            await reader.read(wait, b"c")
        assert refusal.value.status_code == 429
        may_end.set()
        assert await asyncio.gather(*tasks) == [b"a", b"b"]
        assert await reader.read(bytes.upper, b"d") == b"D"

    asyncio.run(ask())
