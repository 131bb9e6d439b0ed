"""Reads no more of a request than the page itself ever sends."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LARGEST_BODY = 1 << 20  # bytes


class BodyLimit:
    """Answers larger requests with status 413; gradio would read all of them into memory."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = _LARGEST_BODY

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, f"a request has at most {_LARGEST_BODY:,} bytes")
            return message

        await self._app(scope, counted, send)
