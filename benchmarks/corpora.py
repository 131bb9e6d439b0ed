"""Documents come and change in a datastore of the standard library while a thread drafts from it:
the seconds until they are drafted from, and the slowest draft meanwhile."""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import hf_refspec as rs
from hf_refspec.store.build.presets import python_stdlib
from hf_refspec.store.names import named_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adds", type=int, default=200, help="of one new document each")
    adds = parser.parse_args().adds
    tokenizer = named_tokenizer(rs.default_model())
    files = [path.read_text(errors="replace") for path in python_stdlib()]
    ids = np.array(tokenizer(files[100])["input_ids"])
    with tempfile.TemporaryDirectory() as folder:
        named = {str(number): text for number, text in enumerate(files)}
        store = rs.Datastore.build(named, tokenizer, Path(folder) / "store", progress=False)
        drafter, drafts, ended = rs.DatastoreDrafts(store), [], threading.Event()

        def read() -> None:
            while not ended.wait(0.002):
                end = 32 + 7 * len(drafts) % (len(ids) - 32)
                drafter.begin(ids[end - 32 : end], store.config.vocab_size)
                begun = time.perf_counter()
                drafter.draft(16)
                drafts.append(time.perf_counter() - begun)

        def found(text: str) -> bool:
            """Whether the datastore holds the beginning of a text."""
            begun = np.array(tokenizer(text.split(";")[0])["input_ids"])
            return any(shard.holds(begun.astype(np.int32)) for shard in store.shards)

        def change(title: str, steps: list[dict[str, str]]) -> None:
            texts, first = [text for step in steps for text in step.values()], len(drafts)
            before, seconds = sum(map(found, texts)), []
            for step in steps:
                begun = time.perf_counter()
                store.add(step, tokenizer, progress=False)
                seconds.append(time.perf_counter() - begun)
            of, slowest = np.array(seconds), max(drafts[first:])
            print(
                f"| {title} | {np.median(of):.2f} | {np.quantile(of, 0.99):.2f} | {of.max():.2f} | "
                f"{before} | {sum(map(found, texts))} of {len(texts)} | {1000 * slowest:.0f} |"
            )

        for number in range(2):  # compiles what merges
            store.add([f"{number} is no document"], tokenizer, progress=False)
        threading.Thread(target=read).start()
        print("| documents | median s | p99 s | max s | found before | after | slowest draft ms |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        new = [{f"new {i}": f"changed{i}x{i * i};\n{text}"} for i, text in enumerate(files[:adds])]
        change("one new", new)
        change("one changed", [{str(i): f"once{i}x{i * i};\n{files[i]}"} for i in range(20)])
        many = {str(i): f"again{i}x{i * i};\n{files[i]}" for i in range(600, 1600)}
        change("1,000 changed at once", [many])
        ended.set()


if __name__ == "__main__":
    main()
