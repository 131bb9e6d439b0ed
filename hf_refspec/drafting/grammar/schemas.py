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


def check_ends(name: str, schema: dict[str, Any]) -> None:
    """Refuses a schema of which no JSON can end: a required part that contains the whole.

    Raises:
        ValueError: If there is none.
    """
    finite: set[str] = set()  # references to what can end
    while True:
        more = {ref for ref in _references(schema) if _ends(_resolved(schema, ref), finite)}
        if more <= finite:
            break
        finite |= more
    if not _ends(schema, finite):
        raise ValueError(
            f"{name} contains itself wherever it is required, so that no JSON of it ends; make one "
            "of the references optional"
        )


def _references(schema: Any) -> set[str]:
    """All references in a schema."""
    if isinstance(schema, list):
        return {ref for part in schema for ref in _references(part)}
    if not isinstance(schema, dict):
        return set()
    own = {schema["$ref"]} if isinstance(schema.get("$ref"), str) else set()
    return own | _references(list(schema.values()))


def _resolved(schema: dict[str, Any], reference: str) -> Any:
    """What a reference into the schema names; one that leads elsewhere is left to llguidance."""
    part: Any = schema
    for key in reference.removeprefix("#").split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        part = part.get(key, {}) if isinstance(part, dict) else {}
    return part


def _ends(schema: Any, finite: set[str]) -> bool:
    """Whether some JSON of a schema ends, if what these references name does."""
    if not isinstance(schema, dict):
        return True
    needed: list[Any] = list(schema.get("allOf", ()))
    if schema.get("type") == "object":
        properties = schema.get("properties", {})
        needed += [properties.get(key) for key in schema.get("required", ())]
    if schema.get("type") == "array":
        first, least = schema.get("prefixItems", []), schema.get("minItems", 0)
        needed += first[:least] + ([schema.get("items")] if least > len(first) else [])
    choices = [schema[name] for name in ("anyOf", "oneOf") if name in schema]
    return (
        schema.get("$ref") in {None, *finite}
        and all(_ends(part, finite) for part in needed)
        and all(any(_ends(part, finite) for part in parts) for parts in choices)
    )
