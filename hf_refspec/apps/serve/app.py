"""The routes, and their documentation at `/docs`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse

from .answers import Answer, ChatAnswer, CompletionAnswer
from .engine import Engine
from .errors import answer_errors
from .parsing import Reader, RequestT, parsed, read_body
from .protocol import ChatRequest, CompletionRequest, TextRequest
from .served_model import Prepared, ServedModel
from .stream import EventStream, Stream, unless_left

_PLACE = "#/components/schemas/"


def make_app(
    served: ServedModel, engine: Engine, max_body_bytes: int, hosts: Sequence[str] | None = None
) -> FastAPI:
    """An app that answers requests with an engine. `hosts` are the names by which clients may reach
    it; any by default."""
    app = FastAPI(title="hf_refspec", redoc_url=None)
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
        prepare: Callable[[RequestT], Prepared],
        answer: Callable[[RequestT], Answer],
    ) -> Response:
        def read(body: bytes) -> tuple[RequestT, Prepared]:
            request = parsed(kind, body)
            return request, prepare(request)

        body = await read_body(http, max_body_bytes)

        async def response() -> Response:
            request, prepared = await reader.read(read, body)
            stream = Stream(engine, await served.constrained(prepared), answer(request))
            return EventStream(stream) if request.stream else JSONResponse(await stream.whole())

        return await unless_left(http, response())

    def choices(request: TextRequest) -> tuple[str, int, bool]:
        options = request.stream_options
        return served.name, request.n or 1, bool(options and options.include_usage)

    @app.post("/v1/chat/completions", openapi_extra=_body(ChatRequest))
    async def chat_completions(http: Request) -> Response:
        def answer(request: ChatRequest) -> Answer:
            return ChatAnswer(*choices(request), bool(request.logprobs))

        return await answered(http, ChatRequest, served.chat, answer)

    @app.post("/v1/completions", openapi_extra=_body(CompletionRequest))
    async def completions(http: Request) -> Response:
        def answer(request: CompletionRequest) -> Answer:
            return CompletionAnswer(*choices(request), request.logprobs is not None)

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

    _, bodies = models_json_schema(
        [(ChatRequest, "validation"), (CompletionRequest, "validation")],
        ref_template=_PLACE + "{model}",
    )
    app.openapi().setdefault("components", {}).setdefault("schemas", {}).update(bodies["$defs"])
    return app


def _body(kind: type[BaseModel]) -> dict[str, Any]:
    """The documentation of a body, which the route reads itself."""
    schema = {"$ref": _PLACE + kind.__name__}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
