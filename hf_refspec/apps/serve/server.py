"""The server, and its limits for connections that wait for their clients."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from time import monotonic
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from .engine import RequestEngine

logger = logging.getLogger(__name__)

_FORCED_SECONDS = 5  # after a second ctrl-C, for a forward pass and for telling the clients
_CHECK_SECONDS = 0.1  # between two checks of the connections


@dataclass(frozen=True)
class Limits:
    """Limits for clients."""

    body_bytes: int
    head_seconds: float = 10  # for a head to arrive
    body_seconds: float = 60  # for a body to arrive
    reading_seconds: float = 30  # for a client to read on
    connections: int = 256  # that may wait longer than a second for a client to send or read
    hosts: Sequence[str] | None = None  # names by which clients may reach the server
    keys: Sequence[str] = ()  # clients must send one, if any
    origins: Sequence[str] = ()  # web pages that may ask


def url(listening: socket.socket) -> str:
    """The address for clients."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def _file_limit() -> float:
    """The number of files and connections that this process may have open."""
    limit = os.sysconf("SC_OPEN_MAX") if hasattr(os, "sysconf") else -1  # Windows has no limit
    return math.inf if limit < 0 else limit


class Server(uvicorn.Server):
    """Serves until ctrl-C or SIGTERM, then finishes all requests; a second one cancels them."""

    def __init__(self, app: FastAPI, engine: RequestEngine, limits: Limits) -> None:
        options: dict[str, Any] = {"http": "h11", "ws": "none", "lifespan": "off"}
        options |= {"log_config": None, "log_level": "warning", "access_log": False}
        super().__init__(uvicorn.Config(app, **options))
        self._engine = engine
        self._limits = limits

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._engine.drain()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # Never cancelled: the shutdown waits for connections, too.
        self._limiting = asyncio.create_task(self._limit_connections())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if left := self._engine.running + self._engine.waiting:
            logger.info("requests left to finish: %d; ctrl-C again ends them at once", left)
        await super().shutdown(sockets)
        if self.force_exit and (tasks := self.server_state.tasks):
            self._engine.cancel_all()
            await asyncio.wait(tasks, timeout=_FORCED_SECONDS)

    async def _limit_connections(self) -> None:
        """Closes connections whose clients owe a request or do not read, the oldest first."""
        since: dict[tuple[Any, Any], float] = {}  # by connection and its latest request
        while True:
            now = monotonic()
            connections = cast(Any, self.server_state.connections)
            waiting = [(known, known.cycle) for known in connections if self._patience(known)]
            since = {key: since.get(key, now) for key in waiting}
            newest_first = sorted(since.items(), key=itemgetter(1), reverse=True)
            for place, ((connection, _), began) in enumerate(newest_first):
                is_old = place >= min(self._limits.connections, _file_limit() // 2)
                if now - began > (1 if is_old else self._patience(connection)):
                    connection.transport.abort()
            await asyncio.sleep(_CHECK_SECONDS)

    def _patience(self, connection: Any) -> float:
        """The seconds to wait for a connection's client; 0 if it owes nothing."""
        cycle = connection.cycle
        if cycle is None or cycle.response_complete:
            return self._limits.head_seconds
        if connection.flow.write_paused:
            return self._limits.reading_seconds
        return math.inf if cycle.more_body else 0  # a body has a limit of its own, in `read_body`
