"""`transformers serve`, in this process: whatever model it loads is drafted."""

import socket

import openai
import pytest
import requests
from transformers.utils.import_utils import is_serve_available

import hf_refspec as rs
from hf_refspec import default_model
from tests.helpers.running_server import wait_until

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
        wait_until(lambda: _answers(url))
        yield url
    finally:
        server.kill_server()


def _answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).ok
    except requests.ConnectionError:
        return False


def completion(url: str, messages: list[dict[str, str]], stream: bool) -> str:
    """The answer to a chat, streamed or at once."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=600)
    options = {"model": default_model(), "max_tokens": 12, "stream": stream}
    answer = client.chat.completions.create(messages=messages, **options)
    if not stream:
        return answer.choices[0].message.content
    return "".join(chunk.choices[0].delta.content or "" for chunk in answer)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions(url, messages, stream):
    plain = completion(url, messages[0], stream)
    assert plain
    with rs.attach(max_draft_tokens=8) as attachment:
        assert completion(url, messages[0], stream) == plain
        wait_until(lambda: attachment.stats.tokens > 0)  # just after the stream has ended
    assert attachment.stats.accepted > 0
    assert attachment.stats.forward_passes < attachment.stats.tokens
