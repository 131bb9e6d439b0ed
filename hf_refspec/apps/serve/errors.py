"""Errors in OpenAI's form."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

logger = logging.getLogger(__name__)

TOO_SLOW = "grammar_too_slow"
_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


@dataclass(eq=False)
class ApiError(HTTPException):
    """Refuses a request; `param` is its field, `code` OpenAI's name of the error."""

    status_code: int
    detail: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status_code, "invalid_request_error")
        about = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": about}


def not_json(where: str = "") -> ApiError:
    return ApiError(400, f"the body is not JSON{where}; send an object as application/json")


def internal_error() -> ApiError:
    return ApiError(500, "the server failed on this request; its log says why")


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down")


def answer_errors(app: FastAPI, count: Callable[[], None]) -> None:
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
