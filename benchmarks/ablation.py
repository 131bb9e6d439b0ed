"""MAT and drafting time against the size of a datastore, for both forms, as in REST's Table 4 and
CREST's Figures 6 to 9.

python benchmarks/ablation.py STORE --data HumanEval.jsonl.gz
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from suites import humaneval, table
from transformers import PreTrainedTokenizerBase

from hf_refspec.apps.bench.measure import replay
from hf_refspec.drafting.datastore_drafts import DatastoreDrafts
from hf_refspec.drafting.drafter import Drafter
from hf_refspec.drafting.reference_copy import ReferenceCopy
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.names import load_tokenizer

FRACTIONS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # of the corpus
MEGABYTES = (0.25, 0.5, 1, 2, 5, 10, 20)  # of the compact form
# CREST's published table: the longest n-gram m, and how many of each length, t.
CREST = ((2, 1000), (2, 5000), (3, 5000), (5, 5000), (5, 20_000), (5, 100_000))
NODES = 64
REST, MIXED, BLEND = "full, REST", "full, mixed", "full, mixed, and ReferenceCopy"
CREST_NAME, COMPACT = "compact, CREST", "compact, mixed"


def _drafters(
    store: Datastore, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, str, int, Drafter]]:
    """The form, its setting, its size in bytes, and a drafter, for each size of each form."""
    documents = list(store.iter_documents())
    # Shuffled, since the first documents may all be alike.
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
                yield BLEND, "", size, ReferenceCopy() | DatastoreDrafts(full)
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


def main(arguments: list[str] | None = None) -> None:
    """Measures a datastore on HumanEval."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("store", help="the folder of a datastore with its full form")
    add("--data", type=Path, required=True, help="HumanEval.jsonl.gz")
    add("--tokenizer", help="default: the one that the datastore carries")
    options = parser.parse_args(arguments)
    store = Datastore(options.store, form="full")
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else store.load_tokenizer()
    problems = humaneval(options.data, tokenizer)
    answers = [(each.prompt_ids, each.answer_ids) for each in problems]
    rows = []
    for form, setting, size, drafter in _drafters(store, tokenizer):
        stats = replay(answers, drafter, len(tokenizer), NODES)
        microseconds = 1e6 * stats.drafting_seconds / stats.tokens
        rows.append([form, setting, f"{size / 1e6:.4g}", f"{stats.mat:.3f}", f"{microseconds:.0f}"])
        print(*rows[-1], flush=True)
    print(table(["form", "setting", "MB", "MAT", "us a token"], rows))


if __name__ == "__main__":
    main()
