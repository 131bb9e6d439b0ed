"""Errors in OpenAI's form."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

logger = logging.getLogger(__name__)

_TOO_SLOW = "grammar_too_slow"
_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class ApiError(HTTPException):
    """Refuses a request in one line; `param` is its field, `code` OpenAI's word for the error."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status_code, "invalid_request_error")
        about = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": about}


def not_json(where: str = "") -> ApiError:
    return ApiError(400, f"the body is not JSON{where}; send an object as application/json")


def too_many(message: str, seconds: int) -> ApiError:
    """Asks the client to try again after some seconds."""
    headers = {"Retry-After": str(seconds)}
    return ApiError(429, f"{message}; try again later", None, "rate_limit_exceeded", headers)


class Places:
    """Counts the requests that wait for the same thing, each inside of a `with` block, and refuses
    more than `most` of them."""

    def __init__(self, waiting: str, most: int = 64) -> None:
        self._waiting, self._most, self._taken = waiting, most, 0

    def __enter__(self) -> None:
        if self._taken == self._most:
            raise too_many(f"{self._taken} {self._waiting}", 1)
        self._taken += 1

    def __exit__(self, *error: Any) -> None:
        self._taken -= 1


def grammar_too_slow(param: str) -> ApiError:
    message = f"{param}: the grammar takes more than 50 ms and 3 ms for each token; make it simpler"
    return ApiError(400, message, param, _TOO_SLOW)


def internal_error() -> ApiError:
    """Tells a client of a fault of the server; the log has the details."""
    return ApiError(500, "the server failed on this request; its log says why")


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down")


def answer_errors(app: FastAPI, count: Callable[[], None]) -> None:
    """Answers all errors in OpenAI's form; counts requests that are refused before decoding."""

    @app.exception_handler(HTTPException)
    async def of_client(request: Request, error: HTTPException) -> JSONResponse:
        if not isinstance(error, ApiError):
            message = f"{error.detail}: {request.method} {request.url.path:.200}"
            error = ApiError(error.status_code, message, headers=dict(error.headers or {}))
        if error.status_code < 500 and error.code != _TOO_SLOW:
            count()
            # No message, no path and no place in a field: they may repeat what a client wrote.
            route = getattr(request.scope.get("route"), "path", "no route")
            why = error.code or (error.param or HTTPStatus(error.status_code).phrase).split(".")[0]
            logger.info("refused: %s, %d, %s", route, error.status_code, why)
        return JSONResponse(error.body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def of_server(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(internal_error().body, 500)
