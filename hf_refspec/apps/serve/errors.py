"""Errors in OpenAI's form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
NO_JSON = "the body is no JSON; send an object as application/json"


class ApiError(HTTPException):
    """A request that is refused.

    Args:
        status (`int`): The HTTP status.
        message (`str`): What is wrong and what to do, one line.
        param (`str`, *optional*): The request's field.
        code (`str`, *optional*): OpenAI's word for it.
        headers (`dict[str, str]`, *optional*): Of the response.
    """

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
        """What the client gets."""
        kind = _TYPES.get(self.status_code, "invalid_request_error")
        about = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": about}


def answer_errors(app: FastAPI, count: Callable[[], None]) -> None:
    """Lets an app answer all errors in OpenAI's form, its framework's own among them.

    Args:
        app (`FastAPI`): The app.
        count (callable): Is called for each that is not the server's own.
    """

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code < 500:
            count()
        if not isinstance(error, ApiError):
            message = f"{error.detail}: {request.method} {request.url.path:.200}"
            error = ApiError(error.status_code, message, headers=dict(error.headers or {}))
        return JSONResponse(error.body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def of_ours(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(internal_error().body, 500)


def internal_error() -> ApiError:
    """What a client is told of a fault of the server; the log has the rest."""
    return ApiError(500, "the server failed on this request; its log says why")


def shutting_down() -> ApiError:
    """What a client is told when the server ends."""
    return ApiError(503, "the server is shutting down")
