"""The server, which limits how long connections may wait for their clients."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Set
from ipaddress import ip_address
from operator import itemgetter
from time import monotonic
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from .engine import Engine

logger = logging.getLogger(__name__)

_FORCED_SECONDS = 5  # after a second ctrl-C: for a forward pass, and to tell the clients
_HEAD_SECONDS = 10  # for the head of a request to arrive
_READING_SECONDS = 30  # for a client to read on
_LOOK_SECONDS = 0.1  # between two looks at the connections
# Connections that may wait for their clients for longer than a second; a client that is about to
# send its request does so at once.
_MOST_WAITING = 256


def is_local(listening: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    return ip_address(listening.getsockname()[0]).is_loopback


def url(listening: socket.socket) -> str:
    """Where clients find it."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


class Server(uvicorn.Server):
    """Serves until ctrl-C or SIGTERM, then finishes all requests; a second one cancels them."""

    def __init__(self, app: FastAPI, engine: Engine) -> None:
        super().__init__(
            uvicorn.Config(
                app, http="h11", ws="none", log_level="warning", access_log=False, lifespan="off"
            )
        )
        self._engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._engine.drain()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # It runs to the end: the shutdown waits for connections, too.
        self._limiting = asyncio.create_task(limit_connections(self.server_state.connections))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if left := self._engine.running + self._engine.waiting:
            logger.info("requests left to finish: %d; ctrl-C again ends them at once", left)
        await super().shutdown(sockets)
        if self.force_exit and (tasks := self.server_state.tasks):
            self._engine.cancel_all()
            await asyncio.wait(tasks, timeout=_FORCED_SECONDS)


async def limit_connections(connections: Set[Any]) -> None:
    """Closes connections whose clients owe a request or do not read, the oldest first."""
    since: dict[tuple[Any, Any], float] = {}  # by connection and its latest request
    while True:
        now = monotonic()
        keys = [(each, each.cycle) for each in connections if _patience(each)]
        since = {key: since.get(key, now) for key in keys}
        newest_first = sorted(since.items(), key=itemgetter(1), reverse=True)
        for place, ((connection, _), began) in enumerate(newest_first):
            if now - began > (_patience(connection) if place < _MOST_WAITING else 1):
                connection.transport.abort()
        await asyncio.sleep(_LOOK_SECONDS)


def _patience(connection: Any) -> float:
    """For how many seconds a connection may stay as it is; 0 if its client owes nothing."""
    cycle = connection.cycle
    if cycle is None or cycle.response_complete:
        return _HEAD_SECONDS
    if connection.flow.write_paused:
        return _READING_SECONDS
    return math.inf if cycle.more_body else 0  # a body has a limit of its own, in `read_body`
