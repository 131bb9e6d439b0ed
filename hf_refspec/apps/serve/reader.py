"""Reads what clients send, outside of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .errors import ApiError

_MOST = 64  # requests that are there in full and wait to be read

ResultT = TypeVar("ResultT")


class Reader:
    """A thread that parses and tokenises one request at a time: several would only take turns with
    each other and with the event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "reader")
        self._waiting = 0

    async def read(self, function: Callable[[bytes], ResultT], body: bytes) -> ResultT:
        """What a function returns for a body.

        Raises:
            ApiError: If too many requests wait for that.
        """
        if self._waiting == _MOST:
            message = f"{_MOST} requests wait to be read; try again later"
            raise ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "1"})
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, function, body)
        finally:
            self._waiting -= 1
