"""MAT against the size of a datastore, in both forms, as in CREST's Figures 6 and 7.

hf-refspec ablate STORE --data HumanEval.jsonl.gz --out DIR
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..drafting.datastore_drafts import DatastoreDrafts
from ..store.datastore import Datastore
from ..store.folder import new_folder
from .plots import new_plot
from .replay import replay, stand_in_model
from .suites import humaneval

SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # of the corpus
MEGABYTES = (0.25, 0.5, 1, 2, 5, 10, 20)  # of the compact form
FULL_REST, FULL_MIXED, COMPACT = "full, REST", "full, mixed", "compact"


@dataclass(frozen=True)
class Point:
    """A datastore's size in bytes, and what it brought."""

    form: str
    size: int
    mat: float


def ablate(options: argparse.Namespace) -> int:
    """`hf-refspec ablate`."""
    store = Datastore(options.store, form="full")
    tokenizer = store.load_tokenizer(options.tokenizer)
    answers = humaneval(options.data, tokenizer)[: options.limit]
    torch.set_num_threads(1)  # the stand-in is too small to share out
    model = stand_in_model(len(tokenizer))
    points = []
    with new_folder(options.out) as out:
        print(f"{'form':12} {'MB':>8} {'MAT':>6}")
        for form, part in chain(_full_stores(store, tokenizer), _compact_stores(store)):
            drafter = DatastoreDrafts(part, mode="rest" if form == FULL_REST else "mixed")
            stats = replay(answers, drafter, model, options.max_draft_tokens)
            points.append(Point(form, _size(part), stats.mat))
            print(f"{form:12} {points[-1].size / 1e6:8.2f} {stats.mat:6.3f}", flush=True)
        (out / "ablation.json").write_text(json.dumps([asdict(p) for p in points], indent=1) + "\n")
        plot_points(points, out / "ablation.png")
    return 0


def _full_stores(
    store: Datastore, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, Datastore]]:
    """The full form of growing parts of the corpus, for both algorithms."""
    documents = list(store.iter_documents())
    # Documents from everywhere: the first ones may be all of a kind.
    order = np.random.default_rng(0).permutation(len(documents))
    for share in SHARES:
        part = [documents[i] for i in order[: max(int(share * len(order)), 1)]]
        with TemporaryDirectory() as folder:
            built = Datastore.build(part, tokenizer, Path(folder) / "store", progress=False)
            yield FULL_REST, built
            yield FULL_MIXED, built


def _compact_stores(store: Datastore) -> Iterator[tuple[str, Datastore]]:
    """Compact forms of growing size."""
    for megabytes in MEGABYTES:
        with TemporaryDirectory() as folder:
            path, size = Path(folder) / "store", int(megabytes * 1e6)
            yield COMPACT, store.compact(path, max_bytes=size, progress=False)


def _size(store: Datastore) -> int:
    """Bytes of the form that is open."""
    if store.form == "compact" and store.config.ngrams is not None:
        return store.config.ngrams.file.size
    shards = store.config.shards
    return sum(shard.tokens_file.size + shard.suffixes_file.size for shard in shards)


def plot_points(points: list[Point], path: Path) -> None:
    """Draws MAT against size, a line for each form."""
    with new_plot(path) as axes:
        for form, marker in ((FULL_REST, "s"), (FULL_MIXED, "o"), (COMPACT, "^")):
            chosen = [point for point in points if point.form == form]
            sizes, mats = [point.size / 1e6 for point in chosen], [point.mat for point in chosen]
            axes.plot(sizes, mats, marker=marker, label=form)
        axes.set(xscale="log", xlabel="size of the datastore (MB)", ylabel="MAT")
