"""The server and its routes."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from hmac import compare_digest
from http import HTTPStatus
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse

from ..shared.body_limit import BodyLimit
from .answers import Answer, EventStream
from .engine import RequestEngine
from .protocol import (
    TOO_SLOW,
    ApiError,
    ChatRequest,
    CompletionRequest,
    RequestT,
    internal_error,
    not_json,
    parsed,
)
from .served_model import ServedModel
from .served_row import PreparedRequest

_PLACE = "#/components/schemas/"
logger = logging.getLogger(__name__)
_FORCED_SECONDS = 5  # after a second ctrl-C, for a forward pass and for telling the clients


def make_app(
    served: ServedModel,
    engine: RequestEngine,
    max_body_bytes: int,
    hosts: Sequence[str] | None = None,
    keys: Sequence[str] = (),
    origins: Sequence[str] = (),
) -> FastAPI:
    """The routes of a model.

    Clients must reach it by one of the names `hosts`, and send one of the `keys`, if there are any;
    `origins` are the web pages that may ask."""
    checks = [Depends(_key_check(keys))] if keys else []
    app = FastAPI(title="hf_refspec", redoc_url=None, dependencies=checks)
    _answer_errors(app, engine.metrics.count_refused)
    app.add_middleware(BodyLimit, max_body_bytes)
    if origins:
        app.add_middleware(CORSMiddleware, origins, ["*"], ["*"])  # methods and headers
    if hosts is not None:
        # Otherwise a page in a browser could reach a local server by a name of its own.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*hosts], www_redirect=False)
    about = {"object": "model", "created": int(time.time()), "owned_by": "hf_refspec"}
    reader = ThreadPoolExecutor(1, "reader")  # further threads would only take turns with it

    async def answered(
        http: Request, kind: type[RequestT], prepare: Callable[[RequestT], list[PreparedRequest]]
    ) -> Response:
        def read(body: bytes) -> tuple[RequestT, list[PreparedRequest]]:
            request = parsed(kind, body)
            return request, prepare(request)

        # A page in a browser may send other types to any server without asking first; it always
        # names its origin. Other clients may leave the type out, or send curl's.
        media_type = http.headers.get("content-type", "").partition(";")[0].strip()
        if media_type != "application/json" and "origin" in http.headers:
            raise not_json()
        body = await http.body()

        async def response() -> Response:
            loop = asyncio.get_running_loop()
            request, prepared = await loop.run_in_executor(reader, read, body)
            prompts = [await served.constrained(prompt) for prompt in prepared]
            answer = Answer(engine, prompts, served.names[0], request)
            if request.stream:
                return EventStream(answer)
            return JSONResponse(await answer.whole())

        return await unless_left(http, response())

    @app.post("/v1/chat/completions", openapi_extra=_body(ChatRequest))
    async def chat_completions(http: Request) -> Response:
        return await answered(http, ChatRequest, served.chat)

    @app.post("/v1/completions", openapi_extra=_body(CompletionRequest))
    async def completions(http: Request) -> Response:
        return await answered(http, CompletionRequest, served.completion)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, **about} for name in served.names]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        served.check_name(name)
        return {"id": name, **about}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "running": engine.running, "waiting": engine.waiting}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(engine.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    _, bodies = models_json_schema(
        [(ChatRequest, "validation"), (CompletionRequest, "validation")],
        ref_template=_PLACE + "{model}",
    )
    app.openapi().setdefault("components", {}).setdefault("schemas", {}).update(bodies["$defs"])
    return app


def _answer_errors(app: FastAPI, count: Callable[[], None]) -> None:
    """Answers all errors in OpenAI's form; counts requests that are refused before decoding."""

    @app.exception_handler(HTTPException)
    async def of_client(request: Request, error: HTTPException) -> JSONResponse:
        if not isinstance(error, ApiError):
            message = f"{error.detail}: {request.method} {request.url.path:.200}"
            error = ApiError(error.status_code, message, headers=error.headers)
        if error.status_code < 500 and error.code != TOO_SLOW:
            count()
            # No message, no path and no place in a field: they may repeat what a client wrote.
            route = getattr(request.scope.get("route"), "path", "no route")
            why = error.code or (error.param or HTTPStatus(error.status_code).phrase).split(".")[0]
            logger.info("refused: %s, %d, %s", route, error.status_code, why)
        return JSONResponse(error.body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def of_server(_request: Request, _error: Exception) -> JSONResponse:
        return JSONResponse(internal_error().body, 500)


def _key_check(keys: Sequence[str]) -> Callable[[Request], Coroutine[Any, Any, None]]:
    """Refuses requests that send none of the keys; only `/health` needs none."""

    async def check(http: Request) -> None:
        kind, _, key = http.headers.get("authorization", "").partition(" ")
        sent = key.strip().encode("latin-1")
        # All keys, each in constant time, so that the time reveals nothing about them. The path is
        # not that of `http.url`, which a header can change.
        same = [compare_digest(sent, os.fsencode(known)) for known in keys]
        if http.scope["path"] != "/health" and not (kind.lower() == "bearer" and any(same)):
            why = "incorrect API key, or none; send the header Authorization: Bearer KEY"
            raise ApiError(401, why, None, "invalid_api_key", {"WWW-Authenticate": "Bearer"})

    return check


def _body(kind: type[BaseModel]) -> dict[str, Any]:
    """The documentation of a body, which the route reads itself."""
    schema = {"$ref": _PLACE + kind.__name__}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


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


def url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


class Server(uvicorn.Server):
    """Serves until ctrl-C or SIGTERM, then finishes all requests; a second one cancels them.

    With that many connections further clients get 503."""

    def __init__(self, app: FastAPI, engine: RequestEngine, connections: int = 256) -> None:
        options: dict[str, Any] = {"http": "h11", "ws": "none", "lifespan": "off"}
        options |= {"log_config": None, "log_level": "warning", "access_log": False}
        super().__init__(uvicorn.Config(app, **options, limit_concurrency=connections))
        self._engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if left := self._engine.running + self._engine.waiting:
            logger.info("requests left to finish: %d; ctrl-C again ends them at once", left)
        await super().shutdown(sockets)
        if self.force_exit and (tasks := self.server_state.tasks):
            self._engine.cancel_all()
            await asyncio.wait(tasks, timeout=_FORCED_SECONDS)
