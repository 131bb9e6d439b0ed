"""The body of a request: first measured, then read as JSON, then checked field by field.

All of it stops at the first thing that is wrong, and none of it runs in the event loop.
"""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Any, TypeVar

from pydantic import ValidationError

from .errors import NO_JSON, ApiError
from .protocol import AnyRequest

# Strings, brackets and commas of a body. Python builds and frees what they describe without letting
# other threads run: so many take 30 ms, and 4 MB of nothing but brackets would take a second.
_MOST_PARTS = 1 << 18
# It matches wherever it begins, so that quotes that are never closed cost nothing.
_PART = re.compile(r'"[^"]*"?|\[|\{|,')

RequestT = TypeVar("RequestT", bound=AnyRequest)


def parsed(kind: type[RequestT], body: bytes) -> RequestT:
    """What a body asks for.

    Raises:
        ApiError: If it is no such request; it names the first thing that is wrong.
    """
    try:
        text = body.decode()
        _check_size(text)
        data = json.loads(text, parse_int=_whole_number)
    except json.JSONDecodeError as error:
        raise ApiError(400, f"{NO_JSON} ({error.msg}, character {error.pos})") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, or thousands of brackets
        raise ApiError(400, NO_JSON) from error
    if not isinstance(data, dict):
        raise ApiError(400, NO_JSON)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _of_first(error) from error


def _check_size(text: str) -> None:
    bare = text.replace("\\\\", "").replace('\\"', "")  # no quote is part of a string any more
    if sum(1 for _ in islice(_PART.finditer(bare), _MOST_PARTS + 1)) > _MOST_PARTS:
        why = f"the body has more than {_MOST_PARTS:,} strings, brackets and commas; shorten it"
        raise ApiError(413, why)


def _whole_number(digits: str) -> int:
    """No field takes as many digits; and thousands of them would take long."""
    return int(digits[:40])


def _of_first(error: ValidationError) -> ApiError:
    """The first thing that is wrong. It does not repeat values, which may be no text."""
    errors: list[Any] = error.errors(include_url=False, include_input=False)
    # A field of several types has an error for each; one that got past the type says more.
    of_field = [each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
    first = next((each for each in of_field if not each["type"].endswith("_type")), errors[0])
    place = ".".join(map(str, filter(_is_plain, first["loc"])))
    why = "Input should be an object" if first["type"] == "model_type" else first["msg"]
    return ApiError(400, f"{place}: {why}", place)


def _is_plain(part: str | int) -> bool:
    """Whether a part of a place is a field's name or an index, and not one of several types."""
    return isinstance(part, int) or (part.isidentifier() and part != "str")
