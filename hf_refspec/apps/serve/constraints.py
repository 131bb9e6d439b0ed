"""What an answer must look like: a JSON schema, calls of tools, or either."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...drafting.grammar.schemas import JSON_FORM, VALUES, call_schema, changed
from .errors import ApiError
from .protocol import AnyText, ChatRequest, NamedTool, ObjectOfSchema, Tool
from .tool_calls import CLOSE, OPEN


def demanded_tools(request: ChatRequest) -> list[Tool]:
    """The tools of which the answer must call one; none if it need not."""
    tools, choice = request.tools or [], request.tool_choice
    if choice in (None, "none", "auto"):
        return []
    if isinstance(choice, NamedTool):
        tools = [each for each in tools if each.function.name == choice.function.name]
        if not tools:
            message = f"tool_choice: there is no tool {choice.function.name[:64]!a} in tools"
            raise ApiError(400, message, "tool_choice")
    if not tools:
        raise ApiError(400, "tool_choice: there are no tools to choose from", "tool_choice")
    return list(tools)


@dataclass(frozen=True)
class Constraint:
    """A grammar that is not compiled yet: an argument of [`GrammarDrafts`], and the request's field
    that it comes from."""

    param: str
    kind: str
    given: Any


def constraint(request: ChatRequest) -> Constraint | None:
    """What the answer must look like, if the request says so. An answer that must be JSON may still
    call a tool, where the model may choose."""
    if demanded := demanded_tools(request):
        return Constraint("tools", "lark", _lark(request, demanded, None))
    schema = _schema(request)
    if schema is None:
        return None
    if request.tools and request.tool_choice != "none":
        return Constraint("response_format", "lark", _lark(request, request.tools, schema))
    return Constraint("response_format", "json_schema", schema)


def _schema(request: ChatRequest) -> dict[str, Any] | None:
    """What a request's JSON must look like."""
    form = request.response_format
    if form is None or isinstance(form, AnyText):
        return None
    if isinstance(form, ObjectOfSchema) and form.json_schema.schema_ is not None:
        return form.json_schema.schema_
    return {"type": "object"}


def _lark(request: ChatRequest, tools: Sequence[Tool], schema: dict[str, Any] | None) -> str:
    """One call or several, or JSON of the schema, in llguidance's dialect of Lark."""
    # Parts of an intersection must allow each other's properties.
    calls = changed(call_schema([each.model_dump() for each in tools]), _closed, VALUES | {"allOf"})
    is_one = request.parallel_tool_calls is False or isinstance(request.tool_choice, NamedTool)
    further = "" if is_one else ' ("\\n" call)*'
    lines = [
        f"start: call{further}{'' if schema is None else ' | json'}",
        f"call: {json.dumps(OPEN)} %json {_formed(calls)} {json.dumps(CLOSE)}",
    ]
    if schema is not None:
        lines.append(f"json: %json {_formed(schema)}")
    return "\n".join(lines)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """An object without further properties, unless the schema allows them: a function would not
    know these arguments."""
    if schema.get("type") == "object" and "properties" in schema:
        return {"additionalProperties": False, **schema}
    return schema


def _formed(schema: dict[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": JSON_FORM})
