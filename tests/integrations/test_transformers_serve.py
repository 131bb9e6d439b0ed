"""`transformers serve`, in this process: whatever model it loads is drafted."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request

import pytest
from transformers.utils.import_utils import is_serve_available

import hf_refspec as rs
from hf_refspec.apps.shared.default_model import default_model

if not is_serve_available():
    pytest.skip("transformers[serving] is not installed", allow_module_level=True)

from transformers.cli.serve import Serve


@pytest.fixture(scope="module")
def url():
    """Where a server of the default model answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Serve(default_model(), device="cpu", host="127.0.0.1", port=port, non_blocking=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while not _answers(url):
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.1)
        yield url
    finally:
        server.kill_server()


def _answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
    except urllib.error.URLError:
        return False


def completion(url: str, messages: list[dict[str, str]], stream: bool) -> str:
    """The answer to a chat, streamed or at once."""
    body = {"messages": messages, "max_tokens": 12, "stream": stream, "model": default_model()}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        if not stream:
            return json.load(response)["choices"][0]["message"]["content"]
        lines = [line.decode().removeprefix("data: ").strip() for line in response]
    chunks = [json.loads(line) for line in lines if line and line != "[DONE]"]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions(url, messages, stream):
    plain = completion(url, messages[0], stream)
    assert plain
    with rs.attach(max_draft_tokens=8) as attachment:
        assert completion(url, messages[0], stream) == plain
        deadline = time.monotonic() + 60
        while not attachment.stats.tokens:  # counted just after the stream has ended
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert attachment.stats.accepted > 0
    assert attachment.stats.forward_passes < attachment.stats.tokens
