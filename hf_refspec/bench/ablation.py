"""MAT against the size of a datastore, in both forms, as in CREST's Figures 6 and 7.

hf-refspec ablate STORE --data HumanEval.jsonl.gz --out DIR
"""

from __future__ import annotations

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
from .suites import RecordedAnswer

FRACTIONS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # of the corpus
MEGABYTES = (0.25, 0.5, 1, 2, 5, 10, 20)  # of the compact form
FULL_REST, FULL_MIXED, COMPACT = "full, REST", "full, mixed", "compact"


@dataclass(frozen=True)
class Point:
    """A datastore's size in bytes, and what it brought."""

    form: str
    size: int
    mat: float


def ablate(
    store: Datastore,
    tokenizer: PreTrainedTokenizerBase,
    answers: list[RecordedAnswer],
    max_draft_tokens: int,
    folder: Path,
    fractions: tuple[float, ...] = FRACTIONS,
    megabytes: tuple[float, ...] = MEGABYTES,
) -> list[Point]:
    """Replays answers with datastores of growing size; prints, writes and plots MAT.

    Args:
        store ([`Datastore`]): With its full form.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        answers (`list[RecordedAnswer]`): What is replayed.
        max_draft_tokens (`int`): Nodes of a draft tree.
        folder (`Path`): The new folder for table and plot.
        fractions (`tuple[float, ...]`): Of the corpus, for the full form.
        megabytes (`tuple[float, ...]`): Of the compact form.

    Raises:
        FileExistsError: If the folder exists.
    """
    torch.set_num_threads(1)  # the stand-in is too small to share out
    model = stand_in_model(len(tokenizer))
    points = []
    with new_folder(folder) as out:
        print(f"{'form':12} {'MB':>8} {'MAT':>6}")
        stores = chain(_full_stores(store, tokenizer, fractions), _compact_stores(store, megabytes))
        for form, part in stores:
            drafter = DatastoreDrafts(part, mode="rest" if form == FULL_REST else "mixed")
            stats = replay(answers, drafter, model, max_draft_tokens)
            points.append(Point(form, _size(part), stats.mat))
            print(f"{form:12} {points[-1].size / 1e6:8.2f} {stats.mat:6.3f}", flush=True)
        (out / "ablation.json").write_text(json.dumps([asdict(p) for p in points], indent=1) + "\n")
        _plot(points, out / "ablation.png")
    return points


def _full_stores(
    store: Datastore, tokenizer: PreTrainedTokenizerBase, fractions: tuple[float, ...]
) -> Iterator[tuple[str, Datastore]]:
    """The full form of growing parts of the corpus, for both algorithms."""
    documents = list(store.iter_documents())
    # Documents from everywhere: the first ones may be all of a kind.
    order = np.random.default_rng(0).permutation(len(documents))
    for fraction in fractions:
        part = [documents[i] for i in order[: max(int(fraction * len(order)), 1)]]
        with TemporaryDirectory() as folder:
            built = Datastore.build(part, tokenizer, Path(folder) / "store", progress=False)
            yield FULL_REST, built
            yield FULL_MIXED, built


def _compact_stores(
    store: Datastore, megabytes: tuple[float, ...]
) -> Iterator[tuple[str, Datastore]]:
    """Compact forms of growing size."""
    for size in megabytes:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "store"
            yield COMPACT, store.compact(path, max_bytes=int(size * 1e6), progress=False)


def _size(store: Datastore) -> int:
    """Bytes of the form that is open."""
    if store.form == "compact" and store.config.ngrams is not None:
        return store.config.ngrams.file.size
    shards = store.config.shards
    return sum(shard.tokens_file.size + shard.suffixes_file.size for shard in shards)


def _plot(points: list[Point], path: Path) -> None:
    """Draws MAT against size, a line for each form."""
    with new_plot(path) as axes:
        for form, marker in ((FULL_REST, "s"), (FULL_MIXED, "o"), (COMPACT, "^")):
            chosen = [point for point in points if point.form == form]
            sizes, mats = [point.size / 1e6 for point in chosen], [point.mat for point in chosen]
            axes.plot(sizes, mats, marker=marker, label=form)
        axes.set(xscale="log", xlabel="size of the datastore (MB)", ylabel="MAT")
