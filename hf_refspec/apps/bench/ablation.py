"""MAT against the size of a datastore, for both forms, as in CREST's Figures 6 and 7.

hf-refspec ablate STORE --data HumanEval.jsonl.gz --out DIR
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ...drafting.datastore_drafts import DatastoreDrafts
from ...store.datastore import Datastore
from ...store.folder import new_folder
from .plots import plot_sizes
from .replay import replay, stand_in_model
from .suites import RecordedAnswer

FRACTIONS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # of the corpus
MEGABYTES = (0.25, 0.5, 1, 2, 5, 10, 20)  # of the compact form
FULL_REST, FULL_MIXED, COMPACT = "full, REST", "full, mixed", "compact"


def ablate(
    store: Datastore,
    tokenizer: PreTrainedTokenizerBase,
    answers: list[RecordedAnswer],
    max_draft_tokens: int,
    folder: Path,
    fractions: tuple[float, ...] = FRACTIONS,
    megabytes: tuple[float, ...] = MEGABYTES,
) -> None:
    """Replays answers with datastores of growing size; prints, writes and plots MAT.

    Args:
        store ([`Datastore`]): A datastore with its full form.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        answers (`list[RecordedAnswer]`): The answers.
        max_draft_tokens (`int`): The draft budget.
        folder (`Path`): The new folder for table and plot.
        fractions (`tuple[float, ...]`): Sizes of the full form, as fractions of the corpus.
        megabytes (`tuple[float, ...]`): Sizes of the compact form.

    Raises:
        FileExistsError: If the folder exists.
    """
    torch.set_num_threads(1)  # the model is too small for more
    model = stand_in_model(len(tokenizer))
    points: list[dict[str, Any]] = []
    with new_folder(folder) as out:
        print(f"{'form':12} {'MB':>8} {'MAT':>6}")
        for form, size, drafter in _drafters(store, tokenizer, fractions, megabytes):
            mat = replay(answers, drafter, model, max_draft_tokens).mat
            points.append({"form": form, "size": size, "mat": mat})
            print(f"{form:12} {size / 1e6:8.2f} {mat:6.3f}", flush=True)
        (out / "ablation.json").write_text(json.dumps(points, indent=1) + "\n")
        forms = {
            form: [(each["size"] / 1e6, each["mat"]) for each in points if each["form"] == form]
            for form in (FULL_REST, FULL_MIXED, COMPACT)
        }
        plot_sizes(forms, out / "ablation.png")


def _drafters(
    store: Datastore,
    tokenizer: PreTrainedTokenizerBase,
    fractions: tuple[float, ...],
    megabytes: tuple[float, ...],
) -> Iterator[tuple[str, int, DatastoreDrafts]]:
    """The form, its size in bytes and a drafter, for each size of each form."""
    documents = list(store.iter_documents())
    # Shuffled, as the first documents may be all of a kind.
    order = np.random.default_rng(0).permutation(len(documents))
    for fraction in fractions:
        part = [documents[i] for i in order[: max(int(fraction * len(order)), 1)]]
        with TemporaryDirectory() as folder:
            full = Datastore.build(part, tokenizer, Path(folder) / "store", progress=False)
            shards = full.config.shards
            size = sum(shard.tokens_file.size + shard.suffixes_file.size for shard in shards)
            yield FULL_REST, size, DatastoreDrafts(full, mode="rest")
            yield FULL_MIXED, size, DatastoreDrafts(full)
    for most in megabytes:
        with TemporaryDirectory() as folder:
            max_bytes = int(most * 1e6)
            compact = store.compact(Path(folder) / "store", max_bytes=max_bytes, progress=False)
            assert compact.config.ngrams is not None
            yield COMPACT, compact.config.ngrams.file.size, DatastoreDrafts(compact)
