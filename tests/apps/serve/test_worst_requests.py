"""The most expensive request of each kind is answered, or refused before it is computed."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.running_server import NAME, RunningServer, serving

pytest.importorskip("llguidance")

USER = {"role": "user", "content": "one"}


def formed(schema: dict[str, Any]) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": [USER], "response_format": form}


def calling(count: int, schema: dict[str, Any]) -> dict[str, Any]:
    functions = [{"name": f"f{i}", "parameters": schema} for i in range(count)]
    tools = [{"type": "function", "function": each} for each in functions]
    return {"messages": [USER], "tools": tools, "tool_choice": "required"}


def chain(length: int, names: int, size: int) -> dict[str, Any]:
    """A chain of references, and many names for one large part."""
    parts = {f"c{i}": {"allOf": [{"$ref": f"#/$defs/c{i + 1}"}]} for i in range(length)}
    parts |= {f"c{length}": {"type": "integer"}, "big": {"allOf": [{}] * size}}
    parts["names"] = {"allOf": [{"$ref": f"#x{i}/$defs/big"} for i in range(names)]}
    return {"type": "object", "$defs": parts}


def arrays(kinds: int) -> dict[str, Any]:
    """Kinds of array that begin alike and hold each other."""
    part = {"$ref": "#/$defs/a"}
    parts = {"a": {"anyOf": [{"type": "array", "items": part}] * kinds}}
    return {"type": "object", "properties": {"a": part}, "required": ["a"], "$defs": parts}


# An intersection that no compiler can tell from the empty one.
PATTERNS = [{"pattern": f"(a|b)*a(a|b){{{i}}}" + "c" * (i % 3)} for i in range(12, 24)]
WIDE = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2200)}}
PARTS = [{"type": "text", "text": "a"}] * 2048
WORST: dict[str, dict[str, Any]] = {
    "schema: references": formed(chain(30, 30, 8000)),
    "schema: patterns": formed({"allOf": [{"type": "string"}, *PATTERNS]}),
    "schema: a mask of a minute": formed(arrays(1200)),
    "schema: masks of 20 ms": formed(arrays(63)),
    "schema: constants": formed({"enum": [f"{i:05}" for i in range(7000)]}),
    "schema: properties": formed(WIDE),
    "tools: references": calling(100, chain(30, 30, 400)),
    "tools: alternatives": calling(128, arrays(63)),
    "messages: many": {"messages": [{"role": "user", "content": "a " * 900}] * 2048},
    "messages: long": {"messages": [{"role": "user", "content": "a" * 4_000_000}]},
    "messages: parts": {"messages": [{"role": "user", "content": PARTS}] * 15},
    "stops": {"messages": [USER], "stop": ["a" * 1_000_000 + letter for letter in "abcd"]},
    "bias": {"messages": [USER], "logit_bias": {str(i): 1 for i in range(250)}},
    "prediction": {
        "messages": [USER],
        "prediction": {"type": "content", "content": "ab" * 2_000_000},
    },
}


# What refuses them; the others are answered.
TOO_LONG = "and the model's context holds 2,048 tokens with the answer"
REFUSED = {
    "schema: patterns": "cannot be compiled",
    "schema: a mask of a minute": "has more than 64 references",
    "schema: properties": "forces a text that is too long",
    "tools: references": TOO_LONG,
    "tools: alternatives": TOO_LONG,
    "messages: many": TOO_LONG,
    "messages: long": TOO_LONG,
    "messages: parts": TOO_LONG,
    "prediction": TOO_LONG,
}


@pytest.fixture(scope="module")
def timeless(byte_llama, tokenizer) -> Iterator[RunningServer]:
    """A server whose limit of time never ends anything: those of size must."""
    options = {"clock": lambda: 0.0, "max_body_bytes": 4 << 20}
    with serving(byte_llama, tokenizer, [], max_rows=2, **options) as server:
        yield server


@pytest.mark.parametrize("kind", WORST)
def test_it_is_answered_or_refused_by_its_size(timeless, kind):
    body = json.dumps({"model": NAME, "max_tokens": 24, **WORST[kind]}).encode()
    answer = timeless.post(body)
    assert answer.status_code == (400 if kind in REFUSED else 200)
    if kind in REFUSED:
        assert REFUSED[kind] in answer.json()["error"]["message"]
