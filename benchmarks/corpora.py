"""Documents come and change in a datastore of the standard library: the seconds until they are
drafted from."""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np

import hf_refspec as rs
from hf_refspec.store.names import named_tokenizer


def python_stdlib() -> list[Path]:
    """The source files of the running interpreter's standard library, its tests included."""
    root = Path(sysconfig.get_path("stdlib"))
    foreign = {"site-packages", "dist-packages"}
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not foreign.intersection(path.relative_to(root).parts)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adds", type=int, default=200, help="of one new document each")
    adds = parser.parse_args().adds
    tokenizer = named_tokenizer(rs.default_model())
    files = [path.read_text(errors="replace") for path in python_stdlib()]
    with tempfile.TemporaryDirectory() as folder:
        named = {str(number): text for number, text in enumerate(files)}
        store = rs.Datastore.build(named, tokenizer, Path(folder) / "store", progress=False)

        def found(text: str) -> bool:
            """Whether the datastore holds the beginning of a text."""
            begun = np.array(tokenizer(text.split(";")[0])["input_ids"])
            return any(shard.holds(begun.astype(np.int32)) for shard in store.shards)

        def change(title: str, steps: list[dict[str, str]]) -> None:
            texts = [text for step in steps for text in step.values()]
            before = sum(map(found, texts))
            seconds = []
            for step in steps:
                begun = time.perf_counter()
                store.add(step, tokenizer, progress=False)
                seconds.append(time.perf_counter() - begun)
            times = " | ".join(f"{np.quantile(seconds, part):.2f}" for part in (0.5, 0.99, 1))
            print(f"| {title} | {times} | {before} | {sum(map(found, texts))} of {len(texts)} |")

        for number in range(2):  # compiles what merges
            store.add([f"{number} is no document"], tokenizer, progress=False)
        print("| documents | median s | p99 s | max s | found before | after |")
        print("| --- | --- | --- | --- | --- | --- |")
        new = [{f"new {i}": f"changed{i}x{i * i};\n{text}"} for i, text in enumerate(files[:adds])]
        change("one new", new)
        change("one changed", [{str(i): f"once{i}x{i * i};\n{files[i]}"} for i in range(20)])
        many = {str(i): f"again{i}x{i * i};\n{files[i]}" for i in range(600, 1600)}
        change("1,000 changed at once", [many])


if __name__ == "__main__":
    main()
