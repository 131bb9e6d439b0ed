"""MAT and drafting time against the size of a datastore, for both forms, as in REST's Table 4 and
CREST's Figures 6 to 9.

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
from replay import walk
from transformers import PreTrainedTokenizerBase

from hf_refspec.apps.bench.plots import (
    ACCENT,
    DARK,
    GREEN,
    MARKERS,
    ORANGE,
    line_legend,
    new_figure,
)
from hf_refspec.apps.bench.suites import RecordedAnswer, humaneval
from hf_refspec.drafting.datastore_drafts import DatastoreDrafts
from hf_refspec.drafting.tree import DraftTree
from hf_refspec.index.rest_trie import all_matches
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.folder import new_folder

FRACTIONS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # of the corpus
MEGABYTES = (0.25, 0.5, 1, 2, 5, 10, 20)  # of the compact form
# CREST's published table: the longest n-gram m, and how many of each length, t.
CREST = ((2, 1000), (2, 5000), (3, 5000), (5, 5000), (5, 20_000), (5, 100_000))
NODES = 64
RANDOM, REST, MIXED = "full, REST, random", "full, REST", "full, mixed"
CREST_NAME, COMPACT = "compact, CREST", "compact, mixed"


class RandomContinuations(DatastoreDrafts):
    """REST's comparison with its trie: continuations drawn at random, as many as the budget holds
    (arXiv 2311.08252, section 5)."""

    def draft(self, budget: int) -> DraftTree:
        matches = all_matches(self.store.shards, self._context, self.min_match)[:1]
        if not matches:
            return DraftTree.empty()
        shard, (begin, end) = self.store.shards[0], matches[0].ranges[0]
        nodes: dict[tuple[int, ...], int] = {}
        for suffix in np.random.default_rng(begin).permutation(np.arange(begin, end)):
            start = shard.suffixes[suffix] + matches[0].length
            path = shard.tokens[start : start + self.continuation_length].tolist()
            if shard.separator in path:
                path = path[: path.index(shard.separator)]
            for depth in range(1, len(path) + 1):
                if len(nodes) == budget:
                    break
                nodes.setdefault(tuple(path[:depth]), len(nodes))
        parents = [nodes.get(path[:-1], -1) for path in nodes]
        tokens = np.array([path[-1] for path in nodes], np.int64)
        return DraftTree(tokens, np.array(parents, np.int32), np.full(len(nodes), 0.5, np.float32))


def ablate(
    store: Datastore,
    tokenizer: PreTrainedTokenizerBase,
    answers: list[RecordedAnswer],
    folder: Path,
) -> None:
    """Walks along answers with datastores of growing size, made from one with its full form;
    prints MAT and microseconds of drafting a token, and writes table and plot to a new folder."""
    points: list[dict[str, Any]] = []
    with new_folder(folder) as out:
        print(f"{'form':34} {'MB':>8} {'MAT':>6} {'us a token':>11}")
        for form, setting, size, drafter in _drafters(store, tokenizer):
            stats = walk(answers, drafter, len(tokenizer), NODES)
            micros = 1e6 * stats.drafting_seconds / stats.tokens
            points.append(
                {"form": form, "setting": setting, "size": size, "mat": stats.mat, "us": micros}
            )
            name = f"{form}, {setting}" if setting else form
            print(f"{name:34} {size / 1e6:8.2f} {stats.mat:6.3f} {micros:11.0f}", flush=True)
        (out / "ablation.json").write_text(json.dumps(points, indent=1) + "\n")
        _plot(points, out / "ablation.png")


def _drafters(
    store: Datastore, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, str, int, DatastoreDrafts]]:
    """The form, its setting, its size in bytes and a drafter, for each size of each form."""
    documents = list(store.iter_documents())
    # Shuffled, as the first documents may all be alike.
    order = np.random.default_rng(0).permutation(len(documents))
    for fraction in FRACTIONS:
        part = [documents[i] for i in order[: max(int(fraction * len(order)), 1)]]
        with TemporaryDirectory() as folder:
            full = Datastore.build(part, tokenizer, Path(folder) / "store", progress=False)
            shards = full.config.shards
            size = sum(shard.tokens_file.size + shard.suffixes_file.size for shard in shards)
            yield REST, "", size, DatastoreDrafts(full, mode="rest")
            yield MIXED, "", size, DatastoreDrafts(full)
            if fraction == 1:
                yield RANDOM, "", size, RandomContinuations(full, mode="rest")
    published = [
        (CREST_NAME, f"m={m} t={t}", {"mode": "rest", "max_ngram": m, "ngrams_per_order": t})
        for m, t in CREST
    ]
    ours = [(COMPACT, "", {"max_bytes": int(most * 1e6)}) for most in MEGABYTES]
    for form, setting, options in (*published, *ours):
        with TemporaryDirectory() as folder:
            compact = store.compact(Path(folder) / "store", progress=False, **options)
            assert compact.config.ngrams is not None
            yield form, setting, compact.config.ngrams.file.size, DatastoreDrafts(compact)


def _plot(points: list[dict[str, Any]], path: Path) -> None:
    """Draws MAT against the size, a line for each form."""
    from matplotlib.ticker import LogLocator

    with new_figure(path, 4) as figure:
        axes = figure.subplots()
        colors = DARK, ACCENT, GREEN, ORANGE
        for form, color, marker in zip(
            (REST, MIXED, CREST_NAME, COMPACT), colors, MARKERS, strict=True
        ):
            of_form = [(each["size"] / 1e6, each["mat"]) for each in points if each["form"] == form]
            axes.plot(*zip(*sorted(of_form), strict=True), color=color, marker=marker, label=form)
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
