"""MAT against the size of a datastore, for both forms, as in CREST's Figures 6 and 7.

python benchmarks/ablation.py STORE --data HumanEval.jsonl.gz --out DIR
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from replay import replay, stand_in_model
from transformers import PreTrainedTokenizerBase

from hf_refspec.apps.bench.plots import ACCENT, DARK, MARKERS, ORANGE, line_legend, new_figure
from hf_refspec.apps.bench.suites import RecordedAnswer, humaneval
from hf_refspec.drafting.datastore_drafts import DatastoreDrafts
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.folder import new_folder

FRACTIONS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # of the corpus
MEGABYTES = (0.25, 0.5, 1, 2, 5, 10, 20)  # of the compact form
NODES = 64
FULL_REST, FULL_MIXED, COMPACT = "full, REST", "full, mixed", "compact"


def ablate(
    store: Datastore,
    tokenizer: PreTrainedTokenizerBase,
    answers: list[RecordedAnswer],
    folder: Path,
) -> None:
    """Replays answers with datastores of growing size, made from one with its full form; prints
    MAT, and writes table and plot to a new folder."""
    torch.set_num_threads(1)  # the model is too small for more
    model = stand_in_model(len(tokenizer))
    points: list[dict[str, Any]] = []
    with new_folder(folder) as out:
        print(f"{'form':12} {'MB':>8} {'MAT':>6}")
        for form, size, drafter in _drafters(store, tokenizer):
            mat = replay(answers, drafter, model, NODES).mat
            points.append({"form": form, "size": size, "mat": mat})
            print(f"{form:12} {size / 1e6:8.2f} {mat:6.3f}", flush=True)
        (out / "ablation.json").write_text(json.dumps(points, indent=1) + "\n")
        _plot(points, out / "ablation.png")


def _drafters(
    store: Datastore, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, int, DatastoreDrafts]]:
    """The form, its size in bytes and a drafter, for each size of each form."""
    documents = list(store.iter_documents())
    # Shuffled, as the first documents may all be alike.
    order = np.random.default_rng(0).permutation(len(documents))
    for fraction in FRACTIONS:
        part = [documents[i] for i in order[: max(int(fraction * len(order)), 1)]]
        with TemporaryDirectory() as folder:
            full = Datastore.build(part, tokenizer, Path(folder) / "store", progress=False)
            shards = full.config.shards
            size = sum(shard.tokens_file.size + shard.suffixes_file.size for shard in shards)
            yield FULL_REST, size, DatastoreDrafts(full, mode="rest")
            yield FULL_MIXED, size, DatastoreDrafts(full)
    for most in MEGABYTES:
        with TemporaryDirectory() as folder:
            max_bytes = int(most * 1e6)
            compact = store.compact(Path(folder) / "store", max_bytes=max_bytes, progress=False)
            assert compact.config.ngrams is not None
            yield COMPACT, compact.config.ngrams.file.size, DatastoreDrafts(compact)


def _plot(points: list[dict[str, Any]], path: Path) -> None:
    """Draws MAT against the size, a line for each form."""
    from matplotlib.ticker import LogLocator

    with new_figure(path, 4) as figure:
        axes = figure.subplots()
        looks = zip((DARK, ACCENT, ORANGE), MARKERS, strict=False)  # the published one in grey
        for form, (color, marker) in zip((FULL_REST, FULL_MIXED, COMPACT), looks, strict=True):
            of_form = [(each["size"] / 1e6, each["mat"]) for each in points if each["form"] == form]
            axes.plot(*zip(*of_form, strict=True), color=color, marker=marker, label=form)
        axes.set(xscale="log", xlabel="size of the datastore, MB", ylabel="MAT")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        line_legend(figure, axes)


def main(arguments: list[str] | None = None) -> None:
    """Measures a datastore on HumanEval."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("store", help="the folder of a datastore with its full form")
    add("--data", type=Path, required=True, help="HumanEval.jsonl.gz")
    add("--tokenizer", help="default: the one that the datastore carries or names")
    add("--out", type=Path, required=True, help="a new folder for table and plot")
    options = parser.parse_args(arguments)
    store = Datastore(options.store, form="full")
    tokenizer = store.load_tokenizer(options.tokenizer)
    ablate(store, tokenizer, humaneval(options.data, tokenizer), options.out)


if __name__ == "__main__":
    main()
