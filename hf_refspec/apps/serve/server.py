"""The socket and the server on it."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from ipaddress import ip_address
from types import FrameType

import uvicorn
from fastapi import FastAPI

from .connection_limits import ConnectionLimits
from .engine import Engine

logger = logging.getLogger(__name__)

_FORCED_SECONDS = 5  # after a second ctrl-C: for a forward pass, and to tell the clients

_LIMITS_SECONDS = 0.1  # between two looks at the connections


def listen(host: str, port: int) -> socket.socket:
    """Takes a port, so that nobody else can.

    Args:
        host (`str`): A name or an address of this machine.
        port (`int`): 0 for any that is free.

    Raises:
        OSError: If it cannot be had.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = f"--port {port} is in use; stop what listens there, or choose another"
        elif error.errno == errno.EACCES:
            why = f"--port {port} is not yours to take; choose one above 1023"
        else:
            why = f"--host {host} is no address of this machine: {error.strerror}"
        raise OSError(why) from error


def is_local(listening: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    return ip_address(listening.getsockname()[0]).is_loopback


def url(listening: socket.socket) -> str:
    """Where clients find it."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


class Server(uvicorn.Server):
    """Serves an app until ctrl-C or SIGTERM. Then nothing new is taken, and what runs and waits is
    finished; a second ctrl-C ends that.

    Args:
        app (`FastAPI`): The app.
        engine ([`Engine`]): What it decodes with.
    """

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
        self._limiting = asyncio.create_task(self._limit_connections())

    async def _limit_connections(self) -> None:
        """Until the end: also while it shuts down, connections are waited for."""
        limits = ConnectionLimits(self.server_state.connections)
        while True:
            limits.enforce()
            await asyncio.sleep(_LIMITS_SECONDS)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if left := self._engine.running + self._engine.waiting:
            logger.info("requests left to finish: %d; ctrl-C again ends them at once", left)
        await super().shutdown(sockets)
        if self.force_exit and (tasks := self.server_state.tasks):
            self._engine.cancel_all()
            await asyncio.wait(tasks, timeout=_FORCED_SECONDS)
