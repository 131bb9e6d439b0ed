"""Damage that knows the formats of a stored folder: config.json and a tokenizer as JSON, arrays as
safetensors. config.json is mostly made to vouch for what its files become, so that what reads them
is reached. What SQL can do to a cache's database is in tests/store/test_sessions.py."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from .damage import BOUNDARIES, CONFIG, Place, content, forge, is_plain, put, swapped

# JSON: config.json, a tokenizer, headers of arrays

ESCAPE = "\x1b[31mred\x1b[0m\r\n\x9b2J\u202e"
STRANGE: list[Any] = [None, True, 1.5, float("nan"), float("inf"), -0.0, "", "x", [], {}, [[]]]
STRANGE += [ESCAPE, "\ud800", "\0", "é" * 3000, 10**400, {"a": [1, {"b": ESCAPE}]}]
STRANGE += [{"x": 10**400}, {"x": float("nan")}, [10**400], 10**18, [-1], [2**32, 2**32]]
STRANGE += ["../outside/victim", "/etc/passwd", "config.json", "a" * 300, "..", "U64", "F16"]
# Some of them mean something somewhere.
NAMES = [ESCAPE, "unknown", "\ud800", "kind", "format", "sha256", "retired", "__metadata__"]
NAMES += ["mat", "license", "corpus", "documents", "shard_tokens", "deduplicated", "encoder"]
TEXTS: dict[str, Callable[[bytes], bytes]] = {
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
}


def config(place: Place, rng: random.Random) -> str:
    """Puts something else into a place of the config, or damages its text as a whole."""
    path = place.folder / CONFIG
    if rng.random() < 0.15 and is_plain(path):
        what = rng.choice(list(TEXTS))
        path.write_bytes(TEXTS[what](path.read_bytes()))
        return what
    read = place.config()
    done = [change(read, rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    place.write_config(read)
    return ", ".join(done)


def tokenizer(place: Place, rng: random.Random) -> str:
    """Changes a place of the tokenizer that a datastore carries."""
    path = place.folder / "tokenizer.json"
    if not is_plain(path) or path.stat().st_size > 1 << 16:
        raise ValueError("there is none, or each use of it takes long")
    read = json.loads(path.read_bytes())
    done = change(read, rng)
    path.write_text(json.dumps(read))
    return done


def header(place: Place, rng: random.Random) -> str:
    """Makes a header say something else of the same numbers, or of its own length."""
    file = place.some_file(rng, "*.safetensors")
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    read, numbers = json.loads(data[8 : 8 + length]), data[8 + length :]
    done = change(read, rng)
    text = json.dumps(read).encode() + b" " * rng.choice([0, 0, 0, 1, 7, 1 << 16])
    stated = len(text) if rng.random() < 0.8 else rng.choice([*BOUNDARIES, len(text) + 1]) % 2**64
    file.write_bytes(stated.to_bytes(8, "little") + text + numbers)
    return f"{done} in {file.name}, {stated} of {len(text)} bytes"


def change(content: Any, rng: random.Random) -> str:
    """Changes one place of JSON."""
    parent, key = rng.choice(places(content))
    value = parent[key]
    what = rng.choice(["deleted", "strange", "number", "near", "escape", "added", "repeated"])
    if what == "deleted":
        del parent[key]
    elif what == "strange":
        parent[key] = rng.choice(STRANGE)
    elif what == "near" and type(value) is int:
        parent[key] = rng.choice([value - 1, value + 1, value + 8, -value, 2 * value, value // 2])
    elif what == "escape" and isinstance(value, str):
        parent[key] = value + ESCAPE
    elif what == "repeated" and isinstance(value, list):
        parent[key] = value * rng.choice([2, 40_000 // max(1, len(value))])
    elif what == "added" and isinstance(parent, dict):
        parent[rng.choice(NAMES)] = rng.choice([value, *STRANGE])
    else:
        parent[key] = rng.choice(BOUNDARIES) + rng.choice([-1, 0, 1])
    return f"{key} {what}"


def places(content: Any) -> list[tuple[Any, Any]]:
    """All places of JSON, at any depth: what holds them, and their keys."""
    found = [(content, key) for key in keys_of(content)]
    for _, key in found.copy():
        if isinstance(content[key], dict | list):
            found += places(content[key])
    return found


def keys_of(content: Any) -> Any:
    return list(content) if isinstance(content, dict) else range(len(content))


# Arrays


def numbers(place: Place, rng: random.Random) -> str:
    """Puts other numbers into an array that is sound as such."""
    file = place.some_file(rng, "*.safetensors")
    arrays = {name: array.copy() for name, array in load(file.read_bytes()).items()}
    name = rng.choice([name for name in sorted(arrays) if len(arrays[name])])
    array, chance = arrays[name], np.random.default_rng(rng.getrandbits(32))
    start = rng.choice([0, rng.randrange(len(array))])
    part = array[start : start + rng.choice([1, 1, 2, 16, len(array)])]
    others = {
        "number": _number(array, rng),
        "shuffled": chance.permutation(part),
        "reversed": part[::-1].copy(),
        "random": np.frombuffer(chance.bytes(part.nbytes), array.dtype),
    }
    [what] = rng.choices(list(others), [4, 1, 1, 1])
    part[:] = others[what]
    file.write_bytes(save(arrays))
    return f"{len(part)} of {name} from {start} in {file.name}: {what}, {part[0]}"


def _number(array: np.ndarray, rng: random.Random) -> Any:
    """A number that is in an array, or at a boundary of its type or of what is in it."""
    if rng.random() < 0.3:
        return array[rng.randrange(len(array))]
    if array.dtype.kind == "f":
        values = [np.nan, np.inf, -np.inf, 0, -1, 1e-45, 3e38, 6e4, rng.random()]
        return np.array(rng.choice(values)).astype(array.dtype)
    near = [len(array), int(array.max()), int(array.min()), *BOUNDARIES]
    info = np.iinfo(array.dtype)
    return min(max(rng.choice(near) + rng.choice([-1, 0, 0, 1]), int(info.min)), int(info.max))


def lengths(place: Place, rng: random.Random) -> str:
    """Changes the length of an array and of others like it, and config.json's numbers of it."""
    file, read = place.some_file(rng, "*.safetensors"), place.config()
    arrays = dict(load(file.read_bytes()))
    name = rng.choice(sorted(arrays))
    before = len(arrays[name])
    after = rng.choice([0, 1, 2, 3, 8, 64, 400, before + 1, max(before - 1, 0)])
    for each, array in arrays.items():
        if len(array) in (before, before + 1):
            arrays[each] = np.resize(array, max(len(array) + after - before, 0))
    for parent, key in places(read):
        if type(parent[key]) is int and abs(parent[key] - before) <= 1:
            parent[key] += after - before
    file.write_bytes(save(arrays))
    place.write_config(read)
    return f"{name} in {file.name} has {after} instead of {before}"


# Each with its weight.
MUTATIONS: dict[Callable[[Place, random.Random], str], int] = {
    **{content: 13, put: 11, swapped: 2, config: 9, tokenizer: 2, header: 5},
    **{numbers: 10, lengths: 4},
}
ALWAYS_FORGED = (tokenizer, header, numbers, lengths)


def damage(place: Place, rng: random.Random) -> str:
    """Damages a folder; returns what was done, in words."""
    done: list[str] = []
    wanted = rng.choice([1, 1, 1, 1, 2, 3])
    for _ in range(20):
        if len(done) == wanted:
            break
        [mutate] = rng.choices(list(MUTATIONS), list(MUTATIONS.values()))
        try:
            done.append(f"{mutate.__name__}: {mutate(place, rng)}")
        except Exception:  # there is no such file, or one before has left nothing of it
            continue
        if mutate in ALWAYS_FORGED or (mutate is not config and rng.random() < 0.7):
            forge(place)
            done[-1] += ", forged"
    return "; ".join(done)
