"""JSON schemas: of pydantic models, of tools, and whether their JSON can end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

# JSON as `json.dumps` writes it: with room for white space anywhere, nothing would be forced.
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def as_schema(given: Any) -> dict[str, Any]:
    """The schema that `json_schema` is: a dict, or that of a pydantic model."""
    if hasattr(given, "model_json_schema"):
        given = given.model_json_schema()
    if not isinstance(given, dict):
        raise TypeError(f"json_schema must be a dict or a pydantic model class, but is {given!r}")
    return given


def call_schema(tools: Any) -> dict[str, Any]:
    """The schema of a call of one of the tools: `{"name": ..., "arguments": {...}}`.

    Args:
        tools (sequence of `dict`): Tool definitions as OpenAI's: `{"type": "function", "function":
            {"name": ..., "parameters": {...}}}`.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise TypeError(f"tools must be a list of tool definitions, but is {tools!r}")
    if len(tools) == 0:
        raise ValueError("tools is empty; give at least one")
    definitions: dict[str, Any] = {}
    calls = [_call(i, tool, definitions) for i, tool in enumerate(tools)]
    return {"anyOf": calls, "$defs": definitions}


def _call(index: int, tool: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TypeError(
            f"tools[{index}] must be a dict as {{'type': 'function', 'function': {{'name': ..., "
            f"'parameters': {{...}}}}}}, but is {tool!r}"
        )
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise TypeError(f"tools[{index}] has parameters that are no dict: {parameters!r}")
    # References count from the root of a schema.
    text = json.dumps(parameters).replace('"$ref": "#', f'"$ref": "#/$defs/{index}')
    definitions[str(index)] = json.loads(text)
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": {"$ref": f"#/$defs/{index}"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
