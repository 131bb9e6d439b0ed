"""Measures how datastores grow: building, extending, merging, compacting, opening, drafting.

    python benchmarks/growth.py FILES... [--tokenizer NAME] [--num-proc N]
    python benchmarks/growth.py --simulate 1000000000000

The second command opens and searches a datastore of that many tokens in sparse files.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import numpy as np

from hf_refspec.apps.shared.loading import load_tokenizer
from hf_refspec.drafting.datastore_drafts import DatastoreDrafts
from hf_refspec.generation.warmup import warmup
from hf_refspec.index.merge import merge_runs
from hf_refspec.index.ngram_counts import count_runs
from hf_refspec.index.suffix_array import build_suffix_array
from hf_refspec.store.build import tokenizing
from hf_refspec.store.build.source import files_of
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.datastore_config import LARGEST_SHARD, ShardEntry, StoreConfig
from hf_refspec.store.files import CONFIG, FileEntry
from hf_refspec.store.tokenizer_file import load_backend

# The fractions of the documents in the datastore after the build and after each extension; where
# there is no increase, a single document is added.
PARTS = (0.5, 0.0, 0.8, 0.81, 0.0, 0.9, 0.92, 0.0, 1.0)
NODES = 64
CONTEXTS = 300
ROUNDS = 10
HELD_OUT = 100  # every 100th document is left out of the datastore, and drafted for
SAMPLE = 3_000_000  # characters, for timing tokenising and sorting
MAPS = 60_000  # of the 65,530 that Linux allows a process


@dataclass(frozen=True)
class Run:
    """A function's run in a process of its own."""

    result: Any
    seconds: float
    cpu_seconds: float  # of all cores together
    peak: int  # bytes of memory, mapped files included


def run(function: Callable[..., Any], *arguments: Any) -> Run:
    """Runs a function in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        return processes.submit(_timed, function, *arguments).result()


def _timed(function: Callable[..., Any], *arguments: Any) -> Run:
    start, cpu_start = perf_counter(), process_time()
    result = function(*arguments)
    seconds, cpu_seconds = perf_counter() - start, process_time() - cpu_start
    unit = 1 if sys.platform == "darwin" else 1024
    return Run(
        result, seconds, cpu_seconds, unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )


def add(path: Path, files: list[Path], tokenizer: str | None, num_proc: int | None) -> None:
    """Builds a datastore of text files, or extends it by them."""
    options = {"num_proc": num_proc, "progress": False}
    if path.exists():
        Datastore(path).extend(files, **options)
    else:
        Datastore.build(files, load_tokenizer(tokenizer), path, corpus="files", **options)


def merge(path: Path, num_proc: int | None) -> None:
    """Merges all shards."""
    Datastore(path).merge(num_proc, progress=False)


def compact(path: Path, out: Path) -> None:
    """Builds the compact form."""
    Datastore(path).compact(out, progress=False)


@dataclass(frozen=True)
class Use:
    """What it costs to use a datastore: medians, in seconds."""

    tokens: int
    shards: int
    opening: float
    warm: float  # a draft whose pages are in memory
    warm_90: float  # which one in ten exceeds
    cold: float  # a draft with nothing in memory; 0 where the system cannot evict a file
    reads: float  # of the disk in it


def use(path: Path, contexts: Sequence[np.ndarray]) -> Use:
    """Opens a datastore and drafts for contexts, int64 of shape `(n,)`."""
    warmup()
    cold, reads = _draft_cold(path, contexts[: CONTEXTS // 10])
    openings = []
    for _ in range(9):
        start = perf_counter()
        store = Datastore(path)
        openings.append(perf_counter() - start)
    times = np.array([_draft_times(store, contexts) for _ in range(ROUNDS)])
    warm = times[1:].min(axis=0)  # the first round brings it into memory
    opening, median, late = np.median(openings), np.median(warm), np.quantile(warm, 0.9)
    sizes = store.tokens, len(store.shards)
    return Use(*sizes, float(opening), float(median), float(late), cold, reads)


def _draft_times(store: Datastore, contexts: Sequence[np.ndarray]) -> list[float]:
    drafter, times = DatastoreDrafts(store), []
    for context in contexts:
        drafter.begin(context, store.config.vocab_size)
        start = perf_counter()
        drafter.draft(NODES)
        times.append(perf_counter() - start)
    return times


def _draft_cold(path: Path, contexts: Sequence[np.ndarray]) -> tuple[float, float]:
    """Seconds and reads of a draft, each after the files were evicted from memory."""
    if not hasattr(os, "posix_fadvise"):
        return 0.0, 0.0
    names = [file.name for file in StoreConfig.read(path).files()]
    times, reads = [], []
    for context in contexts:
        for name in names:
            with open(path / name, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        store = Datastore(path)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        times += _draft_times(store, [context])
        reads.append(resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before)
        del store  # a mapped file is not evicted
    return float(np.median(times)), float(np.median(reads))


def grow(files: list[Path], tokenizer: str | None, num_proc: int | None, folder: Path) -> None:
    """Builds, extends, merges and compacts a datastore, and prints what each step cost."""
    merge_runs.compile()
    count_runs.compile()
    contexts = contexts_of(files[::HELD_OUT], tokenizer)
    files = [file for i, file in enumerate(files) if i % HELD_OUT]
    path, end, before = folder / "store", 0, 0
    print("| step | tokens | shards | seconds | tokens/s | cores | memory | opening | warm draft |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for part in PARTS:
        begin, end = end, max(round(part * len(files)), end + 1)
        step = run(add, path, files[begin:end], tokenizer, num_proc)
        before = _print_row("extend" if begin else "build", step, path, contexts, before)
    step = run(merge, path, num_proc)
    _print_row("merge", step, path, contexts, 0)
    found = run(use, path, contexts).result
    step = run(compact, path, folder / "compact")
    _print_row("compact", step, folder / "compact", contexts, 0)
    print(f"\nCold: a draft takes {1e3 * found.cold:.1f} ms and waits {found.reads:.0f} times.\n")
    _print_costs(files, tokenizer)


def contexts_of(files: Sequence[Path], tokenizer: str | None) -> list[np.ndarray]:
    """Places in texts, and the tokens before each."""
    ids = load_tokenizer(tokenizer)(
        [text for text, _ in zip(_texts(files), range(CONTEXTS), strict=False)],
        add_special_tokens=False,
        verbose=False,
    )["input_ids"]
    rng = np.random.default_rng(0)
    long = [np.array(each) for each in ids if len(each) > 32]
    chosen = rng.integers(len(long), size=CONTEXTS)
    return [long[i][: rng.integers(16, len(long[i]))][-64:] for i in chosen]


def _texts(files: Sequence[Path]) -> Any:
    return (file.read_text(encoding="utf-8", errors="replace") for file in files)


def _print_row(
    name: str, step: Run, path: Path, contexts: Sequence[np.ndarray], before: int
) -> int:
    found = run(use, path, contexts).result
    added = (found.tokens or Datastore(path).config.ngrams.corpus_tokens) - before  # type: ignore
    cells = [
        name,
        f"{found.tokens:,}",
        f"{found.shards}",
        f"{step.seconds:.1f}",
        f"{added / step.seconds:,.0f}",
        f"{step.cpu_seconds / step.seconds:.1f}",
        f"{step.peak / 1e9:.2f} GB",
        f"{1e3 * found.opening:.2f} ms",
        f"{1e6 * found.warm:.0f} µs ({1e6 * found.warm_90:.0f})",
    ]
    print(f"| {' | '.join(cells)} |", flush=True)
    return found.tokens


def _print_costs(files: Sequence[Path], tokenizer: str | None) -> None:
    """Prints the cost of tokenising and sorting on one core."""
    loaded = load_tokenizer(tokenizer)
    backend = load_backend(loaded.backend_tokenizer.to_str())
    texts, size = [], 0
    for text in _texts(files):
        texts.append(text)
        size += len(text)
        if size > SAMPLE:
            break
    start = process_time()
    _, tokens = tokenizing.encode(backend, texts, np.dtype(np.uint32), 2**32 - 1)
    middle = process_time()
    if len(loaded) < 2**16 - 1:
        tokens = tokens.astype(np.uint16)
    build_suffix_array(tokens)
    end = process_time()
    print(f"On one core a token takes {1e6 * (middle - start) / len(tokens):.2f} µs to tokenise,")
    print(f"{1e6 * (end - middle) / len(tokens):.2f} µs to sort.")


def simulate(tokens: int, folder: Path) -> None:
    """Prints the cost of opening and searching a datastore of so many tokens, all zeros."""
    whole, rest = divmod(tokens, LARGEST_SHARD)
    lengths = [LARGEST_SHARD] * whole + [rest] * (rest > 0)
    shards: list[ShardEntry] = []
    for number, length in enumerate(lengths, start=1):
        files = []
        for name, dtype in (("tokens", "U16"), ("suffixes", "I32")):
            path = folder / f"{name}-{number:05d}.safetensors"
            if 1 < number <= whole:  # of the same content, kept in memory once
                os.link(folder / f"{name}-00001.safetensors", path)
                files.append(FileEntry(path.name, path.stat().st_size, "0" * 64))
            else:
                files.append(write_sparse(path, name, dtype, length))
        shards.append(ShardEntry(length, 0, *files))
    StoreConfig("0" * 32, "none", 1000, {}, shards).write(folder)
    warmup()
    start = perf_counter()
    store = Datastore(folder)
    opening = perf_counter() - start
    of_zeros, of_ones = (
        float(np.median(_draft_times(store, [np.full(16, token)] * 5))) for token in (0, 1)
    )
    apparent = sum(file.size for file in store.config.files())
    blocks = sum(os.stat(folder / file.name).st_blocks for file in store.config.files())
    steps = int(np.ceil(np.log2(min(tokens, LARGEST_SHARD))))
    in_a_page = 10  # the last steps of a search
    reads = 2 * steps - in_a_page
    size = (folder / CONFIG).stat().st_size
    print(f"tokens           {tokens:,} in {len(shards)} shards, {apparent / 1e12:.2f} TB")
    print(f"on this disk     {512 * blocks / 1e6:.1f} MB, config.json {size / 1e3:.0f} kB")
    print(f"opening          {1e3 * opening:.1f} ms")
    print(f"a search         {1e3 * of_ones:.2f} ms for a context that nowhere stands")
    print(f"a draft          {1e3 * of_zeros:.2f} ms for one that stands everywhere")
    print(f"from a disk      up to {reads} pages one after another for each length of match")
    for latency, disk in ((100e-6, "NVMe, 0.1 ms"), (1e-3, "network, 1 ms")):
        print(f"  {disk:15}{1e3 * reads * latency:.0f} ms, if all shards are searched at a time")


def write_sparse(path: Path, name: str, dtype: str, length: int) -> FileEntry:
    """Writes a file with an array of zeros that takes up no disk space."""
    size = length * int(dtype[1:]) // 8
    about = {name: {"dtype": dtype, "shape": [length], "data_offsets": [0, size]}}
    header = json.dumps(about).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + size)
    return FileEntry(path.name, path.stat().st_size, "0" * 64)


def main(arguments: list[str] | None = None) -> int:
    """Measures how a datastore grows, or simulates a huge one."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="text files, or folders of them")
    parser.add_argument("--tokenizer", help="a folder or a Hub id; default: the default model's")
    parser.add_argument("--num-proc", type=int, metavar="N")
    parser.add_argument("--simulate", type=int, metavar="TOKENS")
    options = parser.parse_args(arguments)
    if bool(options.files) == (options.simulate is not None):
        parser.error("give text files or folders, or --simulate TOKENS")
    most = LARGEST_SHARD * MAPS // 2
    if options.simulate is not None and not 1 <= options.simulate <= most:
        parser.error(f"--simulate must be from 1 to {most}, but is {options.simulate}")
    with TemporaryDirectory(prefix="hf_refspec-growth-") as folder:
        if options.simulate is not None:
            simulate(options.simulate, Path(folder))
            return 0
        files = [file for path in options.files for file in files_of(path, "*")]
        grow(files, options.tokenizer, options.num_proc, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
