"""A limit on the body of a request."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError

# So many times the limit is read and thrown away: who is still sending would see a connection that
# breaks off, and not the answer.
_DISCARDED = 10


class BodyLimit:
    """Refuses a body that is too large.

    Args:
        app (`ASGIApp`): What reads the body.
        max_bytes (`int`): The most bytes of a body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = 0

        async def receive_limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_bytes:
                while message.get("more_body") and read < _DISCARDED * self._max_bytes:
                    message = await receive()
                    read += len(message.get("body", b""))
                raise self._error()
            return message

        await self._app(scope, receive_limited, send)

    def _error(self) -> ApiError:
        return ApiError(
            413, f"the body has more than {self._max_bytes:,} bytes, which is this server's limit"
        )
