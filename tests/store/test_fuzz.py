"""Files that somebody has tampered with may be refused, but never crash, hang or mislead.

By hand, on as many files as you like: `python tests/datastore/test_fuzz.py FIRST_SEED COUNT`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from hf_refspec.drafting.datastore_drafts import DatastoreDrafts
from hf_refspec.index.suffix_array import IndexedText, build_suffix_array
from hf_refspec.store.compact import compact_form
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.datastore_config import NgramsEntry, ShardEntry, StoreConfig
from hf_refspec.store.files import write_arrays

REFUSED = (ValueError, OSError)  # A DatastoreError is a ValueError.
BOUNDARIES = [0, 1, -1, 2, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**16, 2**24, 2**31 - 2, 2**31 - 1]
BOUNDARIES += [2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30]
STRANGE = [None, True, 1.5, float("nan"), "", "x", [], {}, [[]], "../tokens-00001.safetensors"]
NGRAM_ARRAYS = ("keys", "slots", "starts", "node_tokens", "node_parents", "node_probs")
# The last one has tokens of 32 bits.
VOCABULARIES = [300, 300, 70_000]


@cache
def good_files(vocab_size: int) -> dict[str, bytes]:
    """A datastore of both forms: two shards, with a document that goes on from one to the other."""
    generator = random.Random(vocab_size)
    words = [generator.choices(range(vocab_size), k=generator.randint(1, 6)) for _ in range(12)]
    config = StoreConfig("f" * 32, "t", vocab_size, {"corpus": "x"})
    text: list[int] = []
    while len(text) < 700:
        document = [token for word in generator.choices(words, k=9) for token in word]
        text += [*document, config.separator]
    with tempfile.TemporaryDirectory() as name:
        folder, shards, texts = Path(name), [], []
        for i, part in enumerate((text[:330], text[330:]), start=1):
            tokens = np.array(part, config.token_dtype)
            suffixes = build_suffix_array(tokens)
            files = [
                write_arrays(folder / f"{kind}-{i:05d}.safetensors", {kind: array})
                for kind, array in (("tokens", tokens), ("suffixes", suffixes))
            ]
            shards.append(ShardEntry(len(part), part.count(config.separator), *files))
            texts.append(IndexedText(tokens, suffixes, vocab_size))
        counts, table = compact_form(texts, config, 3, 20, None, False)
        arrays = {name: getattr(table, name) for name in NGRAM_ARRAYS}
        file = write_arrays(folder / "ngrams-0123456789ab.safetensors", arrays)
        ngrams = NgramsEntry(counts, len(table.node_tokens), len(text), file)
        replace(config, shards=shards, ngrams=ngrams).write(folder)
        return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def contexts_of(files: dict[str, bytes], generator: random.Random) -> list[np.ndarray]:
    """Texts to go on from: one that the datastore has, one that it may have, and a single token."""
    tokens = load(files["tokens-00001.safetensors"])["tokens"].astype(np.int64)
    vocab_size = json.loads(files["config.json"])["vocab_size"]
    end = generator.randint(4, len(tokens))
    known = tokens[max(0, end - 16) : end]
    known = known[known < vocab_size]
    return [known, known[-2:], np.array([generator.randrange(vocab_size)])]


def mutated(content: bytes, generator: random.Random) -> bytes:
    """A file's bytes, damaged without regard to what they mean."""
    data = bytearray(content)
    for _ in range(generator.choice([1, 1, 1, 2, 5])):
        # What stands at the beginning, the header, is worth more attempts than its share.
        place = generator.randrange(min(len(data), generator.choice([16, 200, len(data)])) or 1)
        length = generator.choice([1, 2, 4, 8, 64, 300])
        match generator.randrange(7):
            case 0 if data:
                data[place % len(data)] ^= 1 << generator.randrange(8)
            case 1:
                data[place : place + length] = generator.randbytes(length)
            case 2:
                filler = bytes([generator.choice([0, 1, 127, 128, 254, 255])])
                data[place : place + length] = filler * length
            case 3:
                del data[place:]
            case 4:
                data += generator.choice([b"\0", b"\xff", b" "]) * length
            case 5:
                other = generator.randrange(len(data) or 1)
                block = data[other : other + length]
                data[place : place + len(block)] = block
            case 6:
                value = generator.choice(BOUNDARIES) % 2**64
                width = generator.choice("BHIQ")
                packed = struct.pack("<Q", value)[: struct.calcsize(width)]
                place -= place % len(packed)
                data[place : place + len(packed)] = packed
    return bytes(data)


def miscounted(content: bytes, generator: random.Random) -> bytes:
    """A file of arrays that are sound as such, but with other numbers in them."""
    arrays = {name: array.copy() for name, array in load(content).items()}
    for _ in range(generator.choice([1, 1, 2, 6])):
        array = arrays[generator.choice(list(arrays))]
        if not len(array):
            continue
        info = np.iinfo(array.dtype)
        near = [len(array), int(array.max()), int(array.min()), *BOUNDARIES]
        value = generator.choice(near) + generator.choice([-1, 0, 0, 1])
        number = np.array(np.clip(value, info.min, info.max)).astype(array.dtype)
        start = generator.randrange(len(array))
        stop = start + generator.choice([1, 1, 2, 16, len(array)])
        match generator.randrange(6):
            case 0 | 1:
                array[start:stop] = number
            case 2:
                array[:] = number
            case 3:
                np.random.default_rng(generator.getrandbits(32)).shuffle(array[start:stop])
            case 4:
                array[:] = array[::-1].copy()
            case 5:
                random_bytes = np.random.default_rng(generator.getrandbits(32)).bytes(array.nbytes)
                array[start:stop] = np.frombuffer(random_bytes, array.dtype)[start:stop]
    return save(arrays)


def resized(content: bytes, config: dict[str, Any], generator: random.Random) -> bytes:
    """Arrays of other lengths; config.json is told as much as it needs to accept them."""
    arrays = {name: array.copy() for name, array in load(content).items()}
    length = generator.choice([0, 1, 2, 3, 8, 64, 400])
    name = generator.choice(list(arrays))
    arrays[name] = np.resize(arrays[name], length) if len(arrays[name]) else arrays[name]
    if name in ("tokens", "suffixes"):
        for shard in config["shards"]:
            shard["tokens"] = length
    elif name.startswith("node"):
        for each in NGRAM_ARRAYS[3:]:
            arrays[each] = np.resize(arrays[each], length)
        config["ngrams"]["nodes"] = length
    elif name == "keys" or name == "starts":
        orders = config["ngrams"]["ngrams"] = generator.choice([[length], [length, 0], [0] * 8])
        arrays["keys"] = np.resize(arrays["keys"], sum(orders) * len(orders))
        arrays["starts"] = np.resize(arrays["starts"], sum(orders) + 1)
    return save(arrays)


def misconfigured(config: dict[str, Any], generator: random.Random) -> None:
    """Puts something else into one place of a config."""
    inner: Any = config
    while True:
        key = generator.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        if isinstance(inner[key], (dict, list)) and inner[key] and generator.random() < 0.9:
            inner = inner[key]
            continue
        match generator.randrange(4):
            case 0:
                del inner[key]
            case 1:
                inner[key] = generator.choice(STRANGE)
            case _:
                inner[key] = generator.choice(BOUNDARIES) + generator.choice([-1, 0, 1])
        return


def tampered(seed: int) -> dict[str, bytes]:
    """A datastore's files, some of them damaged; mostly so that the first checks pass."""
    generator = random.Random(seed)
    files = dict(good_files(generator.choice(VOCABULARIES)))
    config = json.loads(files["config.json"])
    for _ in range(generator.choice([1, 1, 2, 4])):
        name = generator.choice(list(files))
        kind = generator.randrange(6)
        if name == "config.json":
            misconfigured(config, generator)
            break
        with contextlib.suppress(Exception):  # It cannot be read any more since the last round.
            if kind < 2:
                files[name] = mutated(files[name], generator)
            elif kind < 4:
                files[name] = miscounted(files[name], generator)
            elif kind == 4:
                files[name] = resized(files[name], config, generator)
            else:
                other = generator.choice([each for each in files if each != "config.json"])
                files[name], files[other] = files[other], files[name]
    if generator.random() < 0.9:
        repair(config, files, checksums=generator.random() < 0.5)
    files["config.json"] = json.dumps(config).encode()
    if generator.random() < 0.1:
        files["config.json"] = mutated(files["config.json"], generator)
    return files


def repair(config: dict[str, Any], files: dict[str, bytes], checksums: bool) -> None:
    """Makes a config say the sizes that the files have, as far as it still names them."""
    with contextlib.suppress(TypeError, KeyError, AttributeError):
        entries = [shard[f"{k}_file"] for shard in config["shards"] for k in ("tokens", "suffixes")]
        for entry in [*entries, config["ngrams"]["file"]]:
            if entry["name"] in files:
                entry["size"] = len(files[entry["name"]])
                if checksums:
                    entry["sha256"] = hashlib.sha256(files[entry["name"]]).hexdigest()


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        # What is the same stays. A file that may still be mapped is replaced, never cut short.
        if not path.exists() or path.read_bytes() != content:
            path.unlink(missing_ok=True)
            path.write_bytes(content)


def read_all(folder: Path, contexts: list[np.ndarray], compact: bool) -> tuple[int, int]:
    """Does all that can be done with a datastore; what comes out of it must be in order.

    Returns:
        How many forms could be opened, and how many drafts came out of them.
    """
    opened = drafts = 0
    for form in ("full", "compact"):
        try:
            store = Datastore(folder, form=form)
            assert len(store.shards) == (len(store.config.shards) if form == "full" else 0)
        except REFUSED:
            continue
        opened += 1
        with contextlib.suppress(*REFUSED):
            store.verify()
        assert sum(map(len, store.iter_documents())) <= store.tokens
        if form == "full" and compact:
            with contextlib.suppress(*REFUSED), tempfile.TemporaryDirectory() as new:
                store.compact(Path(new) / "store", ngrams_per_order=9, progress=False)
        for mode in ("mixed", "rest") if form == "full" else ("mixed",):
            drafter = DatastoreDrafts(store, mode=mode)
            for context in contexts:
                for budget in (1, 16, 64):
                    try:
                        drafter.begin(context, store.config.vocab_size)
                        draft = drafter.draft(budget)
                    except REFUSED:
                        continue
                    assert len(draft) <= budget
                    draft.checked(store.config.vocab_size)
                    drafts += 1
    return opened, drafts


def fuzz(folder: Path, seeds: Iterator[int]) -> tuple[int, int, int]:
    """Reads tampered datastores.

    Returns:
        How many there were, how many forms could be opened, and how many drafts came out of them.
    """
    stores = opened = drafts = 0
    for seed in seeds:
        files = tampered(seed)
        write_files(folder, files)
        generator = random.Random(seed)
        contexts = contexts_of(good_files(generator.choice(VOCABULARIES)), generator)
        try:
            more_opened, more_drafts = read_all(folder, contexts, compact=seed % 8 == 0)
        except BaseException as error:
            error.add_note(f"the seed is {seed}")
            raise
        stores, opened, drafts = stores + 1, opened + more_opened, drafts + more_drafts
    return stores, opened, drafts


@pytest.mark.parametrize("first", range(0, 3000, 500))
def test_tampered_files_are_refused_or_give_sound_drafts(tmp_path, first):
    stores, opened, drafts = fuzz(tmp_path, iter(range(first, first + 500)))
    # What is always refused at the door would test nothing behind it.
    assert stores == 500 and opened > 300 and drafts > 2000


def test_nothing_is_read_outside_of_the_arrays(tmp_path):
    # numba checks each index here; its IndexError is among nothing that may come out.
    checked = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_OPT": "0", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, __file__, "5000", "400"]
    run = subprocess.run(command, env=os.environ | checked, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[-1]) > 2000


if __name__ == "__main__":
    import faulthandler

    faulthandler.enable()
    first, count = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        print(*fuzz(Path(name), iter(range(first, first + count))))
