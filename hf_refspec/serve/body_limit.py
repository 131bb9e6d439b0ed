"""A limit on the body of a request."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError


class BodyLimit:
    """Refuses a body that is too large, by what it says of its length and by what is read of it.

    Args:
        app (`ASGIApp`): What reads the body.
        max_bytes (`int`): The most bytes of a body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        announced = int(length) if length.isdecimal() else 0
        read = 0

        async def receive_limited() -> Message:
            nonlocal read
            if announced > self._max_bytes:
                raise self._error()
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_bytes:
                raise self._error()
            return message

        await self._app(scope, receive_limited, send)

    def _error(self) -> ApiError:
        return ApiError(
            413, f"the body has more than {self._max_bytes:,} bytes, which is this server's limit"
        )
