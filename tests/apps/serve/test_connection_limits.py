"""More clients than the server has connections for are refused at once."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from urllib.parse import urlsplit

import requests

from tests.helpers.running_server import serving

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
