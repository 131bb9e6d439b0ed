"""JSON schemas: of tools, and inside other schemas."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

# JSON as `json.dumps` writes it: if white space could be anywhere, nothing would be forced.
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# Keywords whose values map names to schemas, and keywords whose values are any JSON.
_NAMED = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
VALUES = frozenset({"const", "default", "enum", "examples"})


def call_schema(tools: Any) -> dict[str, Any]:
    """The schema of a call of one of the tools: `{"name": ..., "arguments": {...}}`."""
    if not tools:
        raise ValueError("tools is empty; give at least one")
    definitions: dict[str, Any] = {}
    calls = [_call(i, tool, definitions) for i, tool in enumerate(tools)]
    return {"anyOf": calls, "$defs": definitions}


def _call(index: int, tool: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TypeError(
            f"tools[{index}] must be a dict like {{'type': 'function', 'function': {{'name': ..., "
            f"'parameters': {{...}}}}}}, but is {tool!r}"
        )
    parameters = function.get("parameters") or {"properties": {}}

    def moved(schema: dict[str, Any]) -> dict[str, Any]:
        reference = schema.get("$ref")
        # A path counts from the root, and moves with it; "#name" is an anchor, which may be
        # anywhere.
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            return {**schema, "$ref": f"#/$defs/{index}{reference[1:]}"}
        return schema

    definitions[str(index)] = changed({"type": "object", **parameters}, moved)
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            # Arguments are an object, whatever types the parameters allow.
            "arguments": {"type": "object", "$ref": f"#/$defs/{index}"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def changed(
    schema: Any,
    change: Callable[[dict[str, Any]], dict[str, Any]],
    unchanged: Set[str] = VALUES,
) -> Any:
    """Applies a change to a schema and all schemas inside it, except below `unchanged` keywords."""
    if isinstance(schema, list):
        return [changed(part, change, unchanged) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {}
    for keyword, value in schema.items():
        if keyword in _NAMED and isinstance(value, dict):
            named = value.items()
            inner[keyword] = {name: changed(part, change, unchanged) for name, part in named}
        else:
            inner[keyword] = value if keyword in unchanged else changed(value, change, unchanged)
    return change(inner)
