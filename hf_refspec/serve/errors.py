"""Errors in OpenAI's form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
_NO_JSON = "the body is no JSON; send an object as application/json"


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
            message = _NO_JSON if error.status_code == 400 else error.detail
            if error.status_code in (404, 405):
                message = f"{error.detail}: {request.method} {request.url.path}"
            error = ApiError(error.status_code, message, headers=dict(error.headers or {}))
        return JSONResponse(error.body, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def of_validation(request: Request, error: RequestValidationError) -> JSONResponse:
        return await of_http(request, _of_first(error))

    @app.exception_handler(Exception)
    async def of_ours(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(internal_error().body, 500)


def internal_error() -> ApiError:
    """What a client is told of a fault of the server; the log has the rest."""
    return ApiError(500, "the server failed on this request; its log says why")


def shutting_down() -> ApiError:
    """What a client is told when the server ends."""
    return ApiError(503, "the server is shutting down")


def _of_first(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong. It does not repeat values, which may be no text."""
    errors = error.errors()
    # A field of several types has an error for each; one that got past the type says more.
    of_field = [each for each in errors if each["loc"][:2] == errors[0]["loc"][:2]]
    first = next((each for each in of_field if not each["type"].endswith("_type")), errors[0])
    if first["type"] == "json_invalid":
        return ApiError(400, f"{_NO_JSON} ({first['ctx']['error']}, character {first['loc'][-1]})")
    place = ".".join(map(str, filter(_is_plain, first["loc"][1:])))
    if not place and first["type"] in ("missing", "model_attributes_type", "dict_type"):
        return ApiError(400, _NO_JSON)
    param = first.get("ctx", {}).get("param", place or None)
    message = first["msg"] if not place else f"{place}: {first['msg']}"
    return ApiError(400, message, param)


def _is_plain(part: str | int) -> bool:
    """Whether a part of a place is a field's name or an index, and not one of several types."""
    return isinstance(part, int) or (part.isidentifier() and part != "str")
