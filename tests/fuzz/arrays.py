"""Damages files of arrays, knowing that they are of safetensors, and what is in them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from .boundaries import BOUNDARIES
from .forging import CONFIG, forge, is_plain, write_config


def some_arrays(folder: Path, generator: random.Random) -> Path:
    """A file of arrays."""
    files = [file for file in sorted(folder.glob("*.safetensors")) if is_plain(file)]
    return generator.choice(files)


def mutate_header(folder: Path, generator: random.Random) -> str:
    """Makes a header say something else of the same numbers; config.json vouches for it."""
    file = some_arrays(folder, generator)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, numbers = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = generator.choice([each for each in header if each != "__metadata__"])
    what = generator.choice(list(HEADERS))
    HEADERS[what](header, name, generator)
    text = json.dumps(header).encode()
    if what == "longer":
        text += b" " * generator.choice([1, 3, 7, 1 << 16, 1 << 20])
    stated = len(text)
    if what == "length":
        stated = generator.choice([*BOUNDARIES, len(text) + 1, len(text) - 1]) % 2**64
    file.write_bytes(stated.to_bytes(8, "little") + text + numbers)
    forge(folder)
    return f"{what} of {name} in {file.name}"


def _in_offsets(header: Any, name: str, generator: random.Random) -> None:
    place = generator.randrange(2)
    value = header[name]["data_offsets"][place]
    near = [value - 1, value + 1, value - 8, value + 8, *BOUNDARIES]
    header[name]["data_offsets"][place] = generator.choice(near)


def _in_shape(header: Any, name: str, generator: random.Random) -> None:
    shape = header[name]["shape"]
    shapes = [[], [0], [1, *shape], [*shape, 1], [0, *shape], [2**32, 2**32], [-1], [*shape] * 2]
    shapes += [[generator.choice(BOUNDARIES)], [1.5], ["x"], None]
    header[name]["shape"] = generator.choice(shapes)


def _in_type(header: Any, name: str, generator: random.Random) -> None:
    types = ["BOOL", "U8", "I8", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64"]
    header[name]["dtype"] = generator.choice([*types, "U64", "F8_E4M3", "", "X", 3])


def _in_names(header: Any, name: str, generator: random.Random) -> None:
    other = generator.choice(["", "x", "\x1b[31m", "__metadata__", *header])
    about = header.pop(name)
    if generator.random() < 0.7:
        header[other] = about


HEADERS = {
    "offsets": _in_offsets,
    "shape": _in_shape,
    "type": _in_type,
    "names": _in_names,
    "longer": lambda *_: None,
    "length": lambda *_: None,
    "overlap": lambda header, name, generator: header.update(
        {name: header[generator.choice(list(header))]}
    ),
}


def mutate_numbers(folder: Path, generator: random.Random) -> str:
    """Puts other numbers into arrays that are sound as such; config.json vouches for them."""
    file = some_arrays(folder, generator)
    arrays = {name: array.copy() for name, array in load(file.read_bytes()).items()}
    done = []
    for _ in range(generator.choice([1, 1, 2, 6])):
        name = generator.choice(sorted(arrays))
        if len(arrays[name]):
            done.append(f"{name} {_mutate_array(arrays[name], generator)}")
    file.write_bytes(save(arrays))
    forge(folder)
    return f"{', '.join(done)} in {file.name}"


def _mutate_array(array: np.ndarray, generator: random.Random) -> str:
    """Changes some numbers of an array in place."""
    start = generator.randrange(len(array))
    part = array[start : start + generator.choice([1, 1, 2, 16, len(array)])]
    what = generator.choice(["number", "number", "all", "shuffled", "reversed", "random"])
    chance = np.random.default_rng(generator.getrandbits(32))
    if what in ("number", "all"):
        (part if what == "number" else array)[:] = value = _number(array, generator)
        return f"{value} at {start}"
    if what == "shuffled":
        chance.shuffle(part)
    elif what == "reversed":
        array[:] = array[::-1].copy()
    else:
        part[:] = np.frombuffer(chance.bytes(part.nbytes), array.dtype)
    return f"{what} at {start}"


def _number(array: np.ndarray, generator: random.Random) -> Any:
    """One that is at a boundary of an array's type, or of what is in it."""
    if array.dtype.kind == "f":
        numbers = [np.nan, np.inf, -np.inf, 0, -1, 1e-45, 3e38, 6e4, generator.random()]
        return np.array(generator.choice(numbers)).astype(array.dtype)
    near = [len(array), int(array.max()), int(array.min()), *BOUNDARIES]
    value = generator.choice(near) + generator.choice([-1, 0, 0, 1])
    info = np.iinfo(array.dtype)
    return np.array(min(max(value, int(info.min)), int(info.max)), dtype=array.dtype)


def mutate_lengths(folder: Path, generator: random.Random) -> str:
    """Changes an array's length, and all numbers of config.json that were that length."""
    file = some_arrays(folder, generator)
    arrays = dict(load(file.read_bytes()))
    name = generator.choice(sorted(arrays))
    before = len(arrays[name])
    after = generator.choice([0, 1, 2, 3, 8, 64, 400, before + 1, max(before - 1, 0)])
    # All arrays of that length, so that what fits together goes on to do so.
    for each, array in arrays.items():
        if len(array) in (before, before + 1):
            arrays[each] = np.resize(array, max(len(array) + after - before, 0))
    file.write_bytes(save(arrays))
    if is_plain(folder / CONFIG):
        config = json.loads((folder / CONFIG).read_bytes())
        _renumber(config, before, after)
        write_config(folder, config)
    forge(folder)
    return f"{name} in {file.name} has {after} instead of {before}"


def mutate_sizes(folder: Path, generator: random.Random) -> str:
    """Makes a small folder say that it is for a large vocabulary, or has many next tokens, with
    arrays that fit to that."""
    if not all(map(is_plain, folder.iterdir())):  # such as a pipe
        raise ValueError(f"{folder} has something else in it by now")
    config = json.loads((folder / CONFIG).read_bytes())
    if "top_k" in config:
        file, size = folder / "table.safetensors", generator.choice([9, 64, 256, 257, 4096, 2**16])
        arrays = dict(load(file.read_bytes()))
        for name in ("tokens", "probs"):
            arrays[name] = np.resize(arrays[name], size * config["contexts"])
        file.write_bytes(save(arrays))
        what = "top_k"
    else:
        what, size = "vocab_size", generator.choice([2**16 + 1, 3 * 10**8, 2**31 - 2])
        for file in sorted(folder.glob("*.safetensors")):
            arrays = dict(load(file.read_bytes()))
            for name, array in arrays.items():
                if array.dtype == np.uint16:
                    wide = array.astype(np.uint32)
                    wide[array == 2**16 - 1] = 2**32 - 1  # separators
                    arrays[name] = wide
            file.write_bytes(save(arrays))
    write_config(folder, config | {what: size})
    forge(folder)
    return f"{what} is {size}"


def _renumber(content: Any, before: int, after: int) -> None:
    for key in list(content) if isinstance(content, dict) else range(len(content)):
        value = content[key]
        if isinstance(value, dict | list):
            _renumber(value, before, after)
        elif type(value) is int and abs(value - before) <= 1:
            content[key] = value + after - before
