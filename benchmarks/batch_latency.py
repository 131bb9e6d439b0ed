"""The time of a search against the queries in it (RaLMSpec, arXiv 2401.14021, Figure 6).

    python benchmarks/batch_latency.py --knowledge-base BASE --encoder ENCODER [--distractors N]

It prints the median milliseconds of a search for each retriever.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median
from time import perf_counter

import numpy as np
from ralm_suite import QUERY_LENGTH, add_retrievers, retrievers

from hf_refspec.apps.bench.report import table
from hf_refspec.apps.cli.arguments import positive
from hf_refspec.apps.shared.loading import load_tokenizer
from hf_refspec.retrieval.retriever import Retriever
from hf_refspec.smollm2 import HUB_ID

BATCHES = (1, 2, 4, 8, 16, 32)
REPETITIONS = 5


def batch_latency(retriever: Retriever, passages: int, k: int) -> list[float]:
    """The median seconds of a search for each batch of queries, the beginnings of passages."""
    drawn = np.random.default_rng(0).integers(passages, size=BATCHES[-1])
    queries = [retriever.encode(retriever.passage(i)[:QUERY_LENGTH]) for i in drawn.tolist()]
    retriever.search(queries, k)  # the first one compiles and loads

    def seconds(batch: int) -> float:
        began = perf_counter()
        retriever.search(queries[:batch], k)
        return perf_counter() - began

    return [median(seconds(batch) for _ in range(REPETITIONS)) for batch in BATCHES]


def main(arguments: list[str] | None = None) -> int:
    """Measures each retriever and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_retrievers(parser)
    parser.add_argument("--model", help=f"whose tokenizer it was built with; default: {HUB_ID}")
    parser.add_argument("--k", type=positive, default=1, help="passages for each query")
    args = parser.parse_args(arguments)
    if args.knowledge_base is None:
        parser.error("--knowledge-base is missing")
    rows = []
    for name, searched in retrievers(args, load_tokenizer(args.model), args.k).items():
        latency = batch_latency(searched.new_retriever(), searched.size, args.k)
        rows.append([f"{name}, {searched.size:,}", *(f"{1e3 * each:.1f}" for each in latency)])
    print(table(["ms, queries:", *BATCHES], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
