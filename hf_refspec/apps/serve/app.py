"""The routes, their documentation at `/docs`, and the reading of bodies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from .answers import Answer, EventStream
from .engine import Engine
from .errors import ApiError, Places, answer_errors, not_json
from .generation import GenerationRequest
from .protocol import ChatRequest, CompletionRequest, RequestT, parsed
from .served_model import ServedModel
from .server import Limits

# Beyond the limit, a multiple of it is read and discarded: a client that is still sending would see
# a broken connection instead of the answer.
_DISCARDED = 10
_PLACE = "#/components/schemas/"


def make_app(
    served: ServedModel, engine: Engine, limits: Limits, hosts: Sequence[str] | None = None
) -> FastAPI:
    """Answers requests with an engine, if clients reach it by one of the names `hosts`."""
    app = FastAPI(title="hf_refspec", redoc_url=None)
    answer_errors(app, engine.metrics.count_refused)
    if hosts is not None:
        # Otherwise a page in a browser could reach a local server by a name of its own.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*hosts], www_redirect=False)
    now = int(time.time())
    model = {"id": served.name, "object": "model", "created": now, "owned_by": "hf_refspec"}
    reader = ThreadPoolExecutor(1, "reader")  # further threads would only take turns with it
    places = Places("requests wait to be read")

    async def answered(
        http: Request, kind: type[RequestT], prepare: Callable[[RequestT], GenerationRequest]
    ) -> Response:
        def read(body: bytes) -> tuple[RequestT, GenerationRequest]:
            request = parsed(kind, body)
            return request, prepare(request)

        body = await read_body(http, limits)

        async def response() -> Response:
            with places:
                loop = asyncio.get_running_loop()
                request, prepared = await loop.run_in_executor(reader, read, body)
            answer = Answer(engine, await served.constrained(prepared), served.name, request)
            return EventStream(answer) if request.stream else JSONResponse(await answer.whole())

        return await unless_left(http, response())

    @app.post("/v1/chat/completions", openapi_extra=_body(ChatRequest))
    async def chat_completions(http: Request) -> Response:
        return await answered(http, ChatRequest, served.chat)

    @app.post("/v1/completions", openapi_extra=_body(CompletionRequest))
    async def completions(http: Request) -> Response:
        return await answered(http, CompletionRequest, served.completion)

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


async def read_body(http: Request, limits: Limits) -> bytes:
    """Receives a body of JSON; refuses one that is too large or arrives too slowly."""
    # A page in a browser may send other types to any server without asking first.
    if http.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise not_json()
    body, size = bytearray(), 0

    async def receive() -> None:
        nonlocal size
        async with aclosing(http.stream()) as parts:
            async for part in parts:
                size += len(part)
                if size <= limits.body_bytes:
                    body.extend(part)
                elif size >= _DISCARDED * limits.body_bytes:
                    break

    try:
        await asyncio.wait_for(receive(), limits.body_seconds)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not arrive within {limits.body_seconds} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the body broke off") from None
    if size > limits.body_bytes:
        raise ApiError(
            413, f"the body has more than {limits.body_bytes:,} bytes, this server's limit"
        )
    return bytes(body)


async def unless_left(http: Request, response: Coroutine[Any, Any, Response]) -> Response:
    """Awaits a response; cancels the work on it when the client leaves."""
    work = asyncio.create_task(response)

    async def client_leaves() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.create_task(client_leaves())
    try:
        await asyncio.wait([work, leaving], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        return Response(status_code=499)  # nobody reads it
    finally:
        leaving.cancel()
        work.cancel()
