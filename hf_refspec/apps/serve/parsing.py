"""The body of a request: received and measured, then read as JSON, then checked field by field.

Each step stops at the first mistake, and only the first one runs in the event loop.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from itertools import groupby, islice
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from .errors import ApiError, not_json, too_many
from .protocol import TextRequest

_BODY_SECONDS = 60  # for a body to arrive
# How many times the limit is read and discarded: a client that is still sending would see a broken
# connection instead of the answer.
_DISCARDED = 10
_MOST_UNREAD = 64  # complete requests that wait to be parsed
# Strings, brackets and commas of a body. Python builds and frees what they describe without letting
# other threads run: so many take 30 ms, and 4 MB of nothing but brackets would take a second.
_MOST_PARTS = 1 << 18
# It matches wherever it begins, so that quotes that are never closed cost nothing.
_PART = re.compile(r'"[^"]*"?|\[|\{|,')

RequestT = TypeVar("RequestT", bound=TextRequest)
GivenT = TypeVar("GivenT")
ResultT = TypeVar("ResultT")


async def read_body(http: Request, max_bytes: int) -> bytes:
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
                if size <= max_bytes:
                    body.extend(part)
                elif size >= _DISCARDED * max_bytes:
                    break

    try:
        await asyncio.wait_for(receive(), _BODY_SECONDS)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not arrive within {_BODY_SECONDS} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the body broke off") from None
    if size > max_bytes:
        raise ApiError(413, f"the body has more than {max_bytes:,} bytes, this server's limit")
    return bytes(body)


class Reader:
    """A thread that parses and tokenises one request at a time: several threads would only take
    turns with each other and with the event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "reader")
        self._waiting = 0

    async def read(self, function: Callable[[GivenT], ResultT], given: GivenT) -> ResultT:
        """Calls a function with a body, or what it says, unless too many requests wait for that."""
        if self._waiting == _MOST_UNREAD:
            raise too_many(f"{_MOST_UNREAD} requests wait to be read", 1)
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, function, given)
        finally:
            self._waiting -= 1


def parsed(kind: type[RequestT], body: bytes) -> RequestT:
    """Reads a request from a body, or names the first thing that is wrong with it."""
    try:
        text = body.decode()
        _check_size(text)
        # No field takes more digits, and thousands of them would take long to convert.
        data = json.loads(text, parse_int=lambda digits: int(digits[:40]))
    except json.JSONDecodeError as error:
        raise not_json(f" ({error.msg}, character {error.pos})") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, or thousands of brackets
        raise not_json() from error
    if not isinstance(data, dict):
        raise not_json()
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _first_of(error) from error


def _check_size(text: str) -> None:
    bare = text.replace("\\\\", "").replace('\\"', "")  # no string contains a quote any more
    if sum(1 for _ in islice(_PART.finditer(bare), _MOST_PARTS + 1)) > _MOST_PARTS:
        why = f"the body has more than {_MOST_PARTS:,} strings, brackets and commas; shorten it"
        raise ApiError(413, why)


def _first_of(error: ValidationError) -> ApiError:
    """The first error, without the value, which may not be printable."""
    errors: list[Any] = error.errors(include_url=False, include_input=False)
    # A field of several types has an error for each; one that got past the type says more.
    of_field = [each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
    first = next((each for each in of_field if not each["type"].endswith("_type")), errors[0])
    # The kind of an object stands beside the field of the same name.
    place = ".".join(name for name, _ in groupby(map(str, filter(_is_plain, first["loc"]))))
    why = "Input should be an object" if first["type"] == "model_type" else first["msg"]
    return ApiError(400, f"{place}: {why}", place)


def _is_plain(part: str | int) -> bool:
    """Whether a part of a place is a field's name or an index, not one of several types."""
    return isinstance(part, int) or (part.isidentifier() and part != "str")
