"""Limits on the body of a request."""

from __future__ import annotations

import asyncio
from time import monotonic

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError

# So many times the limit is read and thrown away: who is still sending would see a connection that
# breaks off, and not the answer.
_DISCARDED = 10
_SECONDS = 60  # in which a body must have come


class BodyLimit:
    """Refuses a body that is too large, or comes too slowly.

    Args:
        app (`ASGIApp`): What reads the body.
        max_bytes (`int`): The most bytes of a body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ends_at, read, more = monotonic() + _SECONDS, 0, True

        async def receive_part() -> Message:
            nonlocal read, more
            message = await asyncio.wait_for(receive(), ends_at - monotonic() if more else None)
            read += len(message.get("body", b""))
            more = message.get("more_body", False)
            return message

        async def receive_limited() -> Message:
            try:
                message = await receive_part()
                if read > self._max_bytes:
                    while more and read < _DISCARDED * self._max_bytes:
                        await receive_part()
                    raise self._too_large()
                return message
            except asyncio.TimeoutError:
                raise ApiError(408, f"the body did not come within {_SECONDS} s") from None

        await self._app(scope, receive_limited, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body has more than {self._max_bytes:,} bytes, which is this server's limit"
        )
