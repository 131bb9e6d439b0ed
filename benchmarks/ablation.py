"""MAT and drafting time against the size of a datastore, for both forms: REST's Table 4, CREST's
Table 2 and the figures of its accepted length.

python benchmarks/ablation.py STORE --data HumanEval.jsonl.gz
python benchmarks/ablation.py STORE --data model_answer.jsonl --questions spec_bench_questions.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from suites import humaneval, mt_bench, table
from transformers import PreTrainedTokenizerBase

import hf_refspec as rs
from hf_refspec.apps.bench.measure import replay
from hf_refspec.drafting.datastore_drafts import DatastoreDrafts
from hf_refspec.store.names import named_tokenizer

FRACTIONS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # of the corpus
MEGABYTES = (0.1, 0.25, 0.5, 1, 2, 5, 10, 20)  # of the compact form
LONGEST = (1, 2, 3, 4, 5)  # CREST's longest n-gram m
MOST = (1000, 2000, 5000, 20_000, 100_000)  # n-grams of each length, CREST's t
NODES = 64
REST, MIXED, BLEND = "full, REST", "full, mixed", "full, mixed, and ReferenceCopy"
CREST_NAME, COMPACT = "compact, CREST", "compact, mixed"


def _drafters(
    store: rs.Datastore, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, str, int, rs.Drafter, str]]:
    """The form, its setting, its size in bytes, a drafter, and for CREST the mean number of nodes
    of the longest n-grams' trees, for each size of each form."""
    documents = list(store.iter_documents())
    # Shuffled, since the first documents may all be alike.
    order = np.random.default_rng(0).permutation(len(documents))
    for fraction in FRACTIONS:
        part = [documents[i] for i in order[: max(int(fraction * len(order)), 1)]]
        with TemporaryDirectory() as folder:
            full = rs.Datastore.build(part, tokenizer, Path(folder) / "store", progress=False)
            shards = full.config.shards
            size = sum(shard.tokens_file.size + shard.suffixes_file.size for shard in shards)
            yield REST, "", size, DatastoreDrafts(full, published=True), ""
            yield MIXED, "", size, DatastoreDrafts(full), ""
            if fraction == 1:
                yield BLEND, "", size, rs.ReferenceCopy() | DatastoreDrafts(full), ""
    published = [
        (CREST_NAME, f"m={m} t={t}", {"published": True, "max_ngram": m, "ngrams_per_order": t})
        for m in LONGEST
        for t in MOST
    ]
    ours = [(COMPACT, "", {"max_bytes": int(most * 1e6)}) for most in MEGABYTES]
    for form, setting, options in (*published, *ours):
        with TemporaryDirectory() as folder:
            compact = store.compact(Path(folder) / "store", progress=False, **options)
            assert compact.config.ngrams is not None and compact.ngrams is not None
            sizes = np.diff(compact.ngrams.starts)[-compact.config.ngrams.ngrams[-1] :]
            nodes = f"{sizes.mean():.1f}" if form == CREST_NAME else ""
            yield form, setting, compact.config.ngrams.file.size, DatastoreDrafts(compact), nodes


def _compared(sizes: list[tuple[str, int, float]]) -> Iterator[str]:
    """How much smaller than REST's a form is with its MAT, and how much longer in its space."""
    _, rest_size, rest = max((each for each in sizes if each[0] == REST), key=lambda each: each[1])
    for form in (CREST_NAME, COMPACT):
        of_form = [(size, mat) for name, size, mat in sizes if name == form and size <= rest_size]
        best = max((mat for _, mat in of_form), default=0.0)
        yield f"{form}: in REST's space {best / rest - 1:+.1%}"
        if same := [size for size, mat in of_form if mat >= rest]:
            yield f"{form}: REST's MAT in {rest_size / min(same):.1f} times less space"


def main(arguments: list[str] | None = None) -> None:
    """Measures a datastore on recorded answers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("store", help="the folder of a datastore with its full form")
    add("--data", type=Path, required=True, help="HumanEval.jsonl.gz, or answers to MT-bench")
    add("--questions", type=Path, help="spec_bench_questions.jsonl, for answers to MT-bench")
    add("--tokenizer", help="default: the one that the datastore carries")
    options = parser.parse_args(arguments)
    store = rs.Datastore(options.store, form="full")
    tokenizer = named_tokenizer(options.tokenizer) if options.tokenizer else store.named_tokenizer()
    if options.questions is None:
        recorded = humaneval(options.data, tokenizer)
    else:
        recorded = mt_bench(options.data, options.questions, tokenizer)
    answers = [(each.prompt_ids, each.answer_ids) for each in recorded]
    rows, sizes = [], []
    for form, setting, size, drafter, nodes in _drafters(store, tokenizer):
        stats = replay(answers, drafter, len(tokenizer), NODES)
        drafted = f"{stats.drafted / max(stats.drafts, 1):.1f}"
        microseconds = f"{1e6 * stats.drafting_seconds / stats.tokens:.0f}"
        figures = f"{size / 1e6:.4g}", f"{stats.mat:.3f}", drafted, nodes, microseconds
        rows.append([form, setting, *figures])
        sizes.append((form, size, stats.mat))
        print(*rows[-1], flush=True)
    columns = ["form", "setting", "MB", "MAT", "nodes a draft", "nodes a tree of m", "us a token"]
    print(table(columns, rows))
    print(*_compared(sizes), sep="\n")


if __name__ == "__main__":
    main()
