"""Damages files of arrays, knowing that they are of safetensors, and what is in them. config.json
vouches for what they become."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from .configs import keys_of
from .forging import BOUNDARIES, CONFIG, Place, forge, is_plain, write_config

TYPES = ["BOOL", "U8", "I8", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64"]


def mutate_header(place: Place, generator: random.Random) -> str:
    """Makes a header say something else of the same numbers."""
    file = place.some_file(generator, "*.safetensors")
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, numbers = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = generator.choice([each for each in header if each != "__metadata__"])
    what = generator.choice(["offsets", "shape", "type", "names", "longer", "length", "overlap"])
    about = header[name]
    if what == "offsets":
        at = generator.randrange(2)
        value = about["data_offsets"][at]
        near = [value - 1, value + 1, value - 8, value + 8, *BOUNDARIES]
        about["data_offsets"][at] = generator.choice(near)
    elif what == "shape":
        shape = about["shape"]
        shapes = [[], [0], [1, *shape], [*shape, 1], [0, *shape], [2**32, 2**32], [-1], shape * 2]
        shapes += [[generator.choice(BOUNDARIES)], [1.5], ["x"], None]
        about["shape"] = generator.choice(shapes)
    elif what == "type":
        about["dtype"] = generator.choice([*TYPES, "U64", "F8_E4M3", "", "X", 3])
    elif what == "names":
        other = generator.choice(["", "x", "\x1b[31m", "__metadata__", *header])
        header.pop(name)
        if generator.random() < 0.7:
            header[other] = about
    elif what == "overlap":
        header[name] = header[generator.choice(list(header))]
    text = json.dumps(header).encode()
    if what == "longer":
        text += b" " * generator.choice([1, 3, 7, 1 << 16, 1 << 20])
    stated = len(text)
    if what == "length":
        stated = generator.choice([*BOUNDARIES, len(text) + 1, len(text) - 1]) % 2**64
    file.write_bytes(stated.to_bytes(8, "little") + text + numbers)
    forge(place.folder)
    return f"{what} of {name} in {file.name}"


def mutate_numbers(place: Place, generator: random.Random) -> str:
    """Puts other numbers into arrays that are sound as such."""
    file = place.some_file(generator, "*.safetensors")
    arrays = {name: array.copy() for name, array in load(file.read_bytes()).items()}
    done = []
    for _ in range(generator.choice([1, 1, 2, 6])):
        name = generator.choice(sorted(arrays))
        if len(arrays[name]):
            done.append(f"{name} {_mutate_array(arrays[name], generator)}")
    file.write_bytes(save(arrays))
    forge(place.folder)
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
    """A number at a boundary of an array's type, or of what is in it."""
    if array.dtype.kind == "f":
        numbers = [np.nan, np.inf, -np.inf, 0, -1, 1e-45, 3e38, 6e4, generator.random()]
        return np.array(generator.choice(numbers)).astype(array.dtype)
    near = [len(array), int(array.max()), int(array.min()), *BOUNDARIES]
    value = generator.choice(near) + generator.choice([-1, 0, 0, 1])
    info = np.iinfo(array.dtype)
    return np.array(min(max(value, int(info.min)), int(info.max)), dtype=array.dtype)


def mutate_lengths(place: Place, generator: random.Random) -> str:
    """Changes an array's length, and all numbers of config.json that were that length."""
    file = place.some_file(generator, "*.safetensors")
    arrays = dict(load(file.read_bytes()))
    name = generator.choice(sorted(arrays))
    before = len(arrays[name])
    after = generator.choice([0, 1, 2, 3, 8, 64, 400, before + 1, max(before - 1, 0)])
    # All arrays of that length, so that what fits together still does.
    for each, array in arrays.items():
        if len(array) in (before, before + 1):
            arrays[each] = np.resize(array, max(len(array) + after - before, 0))
    file.write_bytes(save(arrays))
    if is_plain(place.folder / CONFIG):
        config = place.config()
        _renumber(config, before, after)
        write_config(place.folder, config)
    forge(place.folder)
    return f"{name} in {file.name} has {after} instead of {before}"


def _renumber(content: Any, before: int, after: int) -> None:
    for key in keys_of(content):
        value = content[key]
        if isinstance(value, dict | list):
            _renumber(value, before, after)
        elif type(value) is int and abs(value - before) <= 1:
            content[key] = value + after - before


def mutate_sizes(place: Place, generator: random.Random) -> str:
    """Makes a small folder claim a large vocabulary, or many next tokens, with arrays that fit."""
    if not all(map(is_plain, place.folder.iterdir())):  # such as a pipe
        raise ValueError(f"{place.folder} has something else in it by now")
    config, what = place.config(), "vocab_size"
    if "top_k" in config:
        what, size = "top_k", generator.choice([9, 64, 256, 257, 4096, 2**16])
    else:
        size = generator.choice([2**16 + 1, 3 * 10**8, 2**31 - 2])
    for file in sorted(place.folder.glob("*.safetensors")):
        arrays = dict(load(file.read_bytes()))
        for name, array in arrays.items():
            if what == "top_k" and name in ("tokens", "probs"):
                arrays[name] = np.resize(array, size * config["contexts"])
            elif what == "vocab_size" and array.dtype == np.uint16:
                arrays[name] = array.astype(np.uint32)
                arrays[name][array == 2**16 - 1] = 2**32 - 1  # separators
        file.write_bytes(save(arrays))
    write_config(place.folder, config | {what: size})
    forge(place.folder)
    return f"{what} is {size}"
