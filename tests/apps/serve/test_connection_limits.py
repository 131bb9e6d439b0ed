"""Clients that send half of a request, or do not read, hold nobody up, and not for long."""

from __future__ import annotations

import json
import socket
import time
from urllib.parse import urlsplit

import pytest

from hf_refspec.apps.serve import routes as servers
from tests.helpers.running_server import NAME, RunningServer, serving, wait_until

HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX"
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def connected(server: RunningServer, sent: bytes = b"") -> socket.socket:
    parts = urlsplit(server.url)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=600)
    connection.sendall(sent)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed it; it has sent nothing."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def begun_requests(server: RunningServer) -> tuple[int, int]:
    """How many connections the server has, and how many of them have sent a whole head."""
    connections = list(server.server.server_state.connections)
    return len(connections), sum(each.cycle is not None for each in connections)


@pytest.mark.parametrize("before", [b"", HEALTH])
def test_half_a_head_is_not_waited_for_however_it_drips(speller, tokenizer, before):
    with serving(speller, tokenizer, head_seconds=0.5) as server:
        connection = connected(server, before)
        if before:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        with pytest.raises(ConnectionError):
            while True:
                connection.sendall(b"G")
                time.sleep(0.1)


def test_of_too_many_half_requests_the_oldest_are_given_up(speller, tokenizer, monkeypatch):
    """By this clock, no time passes before all of them are there."""
    body = HALF + b": 1\r\nContent-Length: 9\r\nContent-Type: application/json\r\n\r\n{"
    connections = []
    looks = []
    waited = 0.0

    def clock() -> float:
        looks.append(True)
        return waited + 1e-6 * len(looks)

    monkeypatch.setattr(servers, "monotonic", clock)
    with serving(speller, tokenizer, connections=4, body_seconds=600) as server:
        for number in range(8):
            connections.append(connected(server, body if number % 2 else HALF))
            wait_until(lambda: begun_requests(server) == (len(connections), len(connections) // 2))
            before = len(looks)
            wait_until(lambda before=before: len(looks) > before + 1)
        waited = 2.0
        wait_until(lambda: sum(map(is_closed, connections)) == 4)
        assert [is_closed(each) for each in connections] == [True] * 4 + [False] * 4
        assert server.metrics()["running_requests"] == 0
        for each in connections:
            each.close()


def test_a_client_that_does_not_read_holds_up_neither_others_nor_the_end(speller, tokenizer, plain):
    messages = [{"role": "user", "content": "one"}]
    body = {"model": NAME, "messages": messages, "max_tokens": 2000, "stream": True}
    with serving(speller, tokenizer, max_new_tokens=2000, reading_seconds=1) as server:
        assert server.metrics()["running_requests"] == 0  # it has started
        [listening] = server.server.servers[0].sockets
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        parts, data = urlsplit(server.url), json.dumps(body).encode()
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((parts.hostname, parts.port))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
        reader.sendall(head + data)
        wait_until(lambda: server.engine.running == 1)
        assert server.chat("one").choices[0].message.content == plain("one")
        server.server.handle_exit(2, None)
        wait_until(lambda: not server.server.server_state.connections)
        assert server.engine.running == 0
        reader.close()
