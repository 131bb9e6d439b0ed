"""Damages config.json, and the tokenizer of a datastore, knowing that they are JSON."""

from __future__ import annotations

import json
import random
from typing import Any

from .forging import BOUNDARIES, CONFIG, Place, forge, is_plain, read_json, write_config

ESCAPE = "\x1b[31mred\x1b[0m\r\n\x9b2J\u202e"
STRANGE: list[Any] = [None, True, 1.5, float("nan"), float("inf"), -0.0, "", "x", [], {}, [[]]]
STRANGE += [ESCAPE, "\ud800", "\0", "é" * 3000, 10**400, {"a": [1, {"b": ESCAPE}]}]
STRANGE += [{"x": 10**400}, {"x": float("nan")}, [10**400], 10**18]
STRANGE += ["../outside/victim", "/etc/passwd", "config.json", "a" * 300, ".."]
# Parts of a tokenizer over which the library panics, or searches for long.
PARTS: list[dict[str, Any]] = [
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AA=="}},
    {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    {"decoder": {"type": "Strip", "content": "a", "start": 10**9, "stop": 5}},
    {"normalizer": {"type": "Replace", "pattern": {"Regex": "([a-z ]+)+$"}, "content": ""}},
    {"normalizer": {"type": "Replace", "pattern": {"Regex": "^(([a-z])+.)+[A-Z]"}, "content": ""}},
]
# Some of them mean something somewhere.
NAMES = [ESCAPE, "unknown", "\ud800", "kind", "format", "sha256", "retired"]
NAMES += ["mat", "license", "corpus", "documents", "shard_tokens", "deduplicated", "encoder"]


def mutate_config(place: Place, generator: random.Random) -> str:
    """Puts something else into a place of the config, or damages its text as a whole."""
    path = place.folder / CONFIG
    if not is_plain(path):
        raise ValueError(f"{path} is no file any more")
    if generator.random() < 0.15:
        what = generator.choice(list(TEXTS))
        path.write_bytes(TEXTS[what](path.read_bytes()))
        return what
    content = read_json(path)
    done = [mutate_value(content, generator) for _ in range(generator.choice([1, 1, 1, 2, 3]))]
    write_config(place.folder, content)
    return ", ".join(done)


def mutate_tokenizer(place: Place, generator: random.Random) -> str:
    """Changes a place of the tokenizer that a datastore carries."""
    path = place.folder / "tokenizer.json"
    content = read_json(path)
    if path.stat().st_size > 1 << 16:
        raise ValueError("each use of a large tokenizer takes long")
    if generator.random() < 0.3:
        content |= (part := generator.choice(PARTS))
        done = f"{part}"
    else:
        done = mutate_value(content, generator)
    path.write_text(json.dumps(content), "utf-8", "surrogatepass")
    forge(place.folder)
    return f"tokenizer: {done}"


def mutate_value(content: Any, generator: random.Random) -> str:
    """Changes one place of a config."""
    parent, key = generator.choice(places(content))
    value = parent[key]
    what = generator.choice(["deleted", "strange", "number", "near", "escape", "added", "repeated"])
    if what == "deleted":
        del parent[key]
    elif what == "strange":
        parent[key] = generator.choice(STRANGE)
    elif what == "near" and type(value) is int:
        parent[key] = generator.choice([value - 1, value + 1, -value, 2 * value, value // 2])
    elif what == "escape" and isinstance(value, str):
        parent[key] = value + ESCAPE
    elif what == "repeated" and isinstance(value, list):
        parent[key] = value * generator.choice([2, 40_000 // max(1, len(value))])
    elif what == "added" and isinstance(parent, dict):
        parent[generator.choice(NAMES)] = generator.choice([value, *STRANGE])
    else:
        parent[key] = generator.choice(BOUNDARIES) + generator.choice([-1, 0, 1])
    return f"{key} {what}"


def keys_of(content: Any) -> Any:
    return list(content) if isinstance(content, dict) else range(len(content))


def places(content: Any) -> list[tuple[Any, Any]]:
    """All places of a config, at any depth: what holds them, and their keys."""
    found = [(content, key) for key in keys_of(content)]
    for _, key in found.copy():
        if isinstance(content[key], dict | list):
            found += places(content[key])
    return found


TEXTS = {
    "empty": lambda text: b"",
    "no object": lambda text: b"[" + text + b"]",
    "nested too deep": lambda text: b'{"source": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "nested deep": lambda text: text.replace(
        b'"source": {', b'"source": {"x": ' + b"[" * 300 + b"]" * 300 + b", "
    ),
    "every key twice": lambda text: text.rstrip()[:-1] + b"," + text.lstrip()[1:],
    "too large": lambda text: text + b" " * (1 << 23),
    "a number of 9,000 digits": lambda text: text.replace(b"1", b"1" * 9000, 1),
    "a byte order mark": lambda text: b"\xef\xbb\xbf" + text,
    "not UTF-8": lambda text: text.replace(b'"', b'"\xff\xfe', 3),
    "UTF-16": lambda text: text.decode("utf-8", "replace").encode("utf-16"),
    "an infinite number": lambda text: text.replace(b": 1", b": 1e999", 1),
    "zeros": lambda text: bytes(len(text)),
}
