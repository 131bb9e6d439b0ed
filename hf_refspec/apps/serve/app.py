"""The routes, and the answer to a request, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from .answers import ChatAnswer, CompletionAnswer
from .engine import Engine
from .errors import ApiError, answer_errors, internal_error, shutting_down
from .generation import GenerationRequest
from .parsing import Reader, RequestT, parsed, read_body
from .protocol import ChatRequest, CompletionRequest
from .served_model import ServedModel


def make_app(
    served: ServedModel, engine: Engine, max_body_bytes: int, hosts: Sequence[str] | None = None
) -> FastAPI:
    """An app that answers requests with an engine. `hosts` are the names by which clients may reach
    it; any by default."""
    # Pages about the routes would load scripts from elsewhere.
    app = FastAPI(title="hf_refspec", docs_url=None, redoc_url=None)
    answer_errors(app, engine.metrics.count_refused)
    if hosts is not None:
        # A page in a browser could otherwise reach a local server by a name of its own.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*hosts], www_redirect=False)
    now = int(time.time())
    model = {"id": served.name, "object": "model", "created": now, "owned_by": "hf_refspec"}
    reader = Reader()

    async def answered(
        http: Request,
        kind: type[RequestT],
        prepare: Callable[[RequestT], GenerationRequest],
        answer: CompletionAnswer,
    ) -> Response:
        def read(body: bytes) -> tuple[RequestT, GenerationRequest]:
            request = parsed(kind, body)
            return request, prepare(request)

        request, prepared = await reader.read(read, await read_body(http, max_body_bytes))
        stream = Stream(engine, prepared, answer)
        if request.stream:
            options = request.stream_options
            return EventStream(stream, bool(options and options.include_usage))
        return JSONResponse(await _whole(http, stream))

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        return await answered(http, ChatRequest, served.chat, ChatAnswer(served.name))

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        answer = CompletionAnswer(served.name)
        return await answered(http, CompletionRequest, served.completion, answer)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        served.check_name(name)
        return model

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "running": engine.running, "waiting": engine.waiting}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(engine.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app


class Stream:
    """Submits a request to the engine, and hands its text to the event loop piece by piece."""

    def __init__(
        self, engine: Engine, request: GenerationRequest, answer: CompletionAnswer
    ) -> None:
        self.answer = answer
        self._engine = engine
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.generation = engine.submit(request, self._put)

    async def pieces(self) -> AsyncIterator[str]:
        """The text; raises an `ApiError` if it could not be generated."""
        while (piece := await self._pieces.get()) is not None:
            yield piece
        if self.generation.outcome == "error":
            raise internal_error()
        if self.generation.outcome == "cancelled":  # while its client still reads
            raise shutting_down()

    def cancel(self) -> None:
        """Ends the generation: its client has left."""
        self._engine.cancel(self.generation)

    def _put(self, piece: str | None) -> None:  # called in the engine's thread
        try:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)
        except RuntimeError:  # the event loop is closed
            self.generation.cancelled = True


async def _whole(http: Request, stream: Stream) -> dict[str, Any]:
    """The complete answer; a client that leaves cancels its generation."""

    async def client_leaves() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.create_task(client_leaves())
    leaving.add_done_callback(lambda _: stream.cancel())
    try:
        text = "".join([piece async for piece in stream.pieces()])
    finally:
        leaving.cancel()
    return stream.answer.whole(text, stream.generation)


class EventStream(StreamingResponse):
    """The answer in chunks, as server-sent events. However it ends, so does the generation."""

    def __init__(self, stream: Stream, includes_usage: bool) -> None:
        super().__init__(_events(stream, includes_usage), media_type="text/event-stream")
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.cancel()


async def _events(stream: Stream, includes_usage: bool) -> AsyncIterator[str]:
    answer = stream.answer
    if (first := answer.first_chunk()) is not None:
        yield _event(first)
    try:
        async for piece in stream.pieces():
            yield _event(answer.chunk(piece))
    except ApiError as error:
        yield _event(error.body)
        return
    yield _event(answer.chunk("", stream.generation.finish_reason))
    if includes_usage:
        yield _event(answer.usage_chunk(stream.generation))
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
