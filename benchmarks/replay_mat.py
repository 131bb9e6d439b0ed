"""MAT of several drafters on the retrieval-augmented prompts.

python benchmarks/replay_mat.py llma_rag.jsonl --tokenizer path/or/hub-id
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from replay import replay, stand_in_model
from transformers.generation.candidate_generator import (
    CandidateGenerator,
    PromptLookupCandidateGenerator,
)

from hf_refspec.apps.bench.suites import llma_rag
from hf_refspec.apps.shared.default_model import load_tokenizer
from hf_refspec.drafting.reference_copy import ReferenceCopy

# The rows of the table: a name, the drafter, the number of draft nodes, and the verification.
CONTENDERS: tuple[tuple[str, Callable[[], CandidateGenerator], int, str], ...] = (
    (
        "transformers' prompt look-up",
        lambda: PromptLookupCandidateGenerator(num_output_tokens=10, max_length=2**31),
        10,
        "chain",
    ),
    ("LLMA (n=1, k=18)", lambda: ReferenceCopy(mode="llma", copy_length=18), 18, "chain"),
    ("ReferenceCopy, chain", ReferenceCopy, 18, "chain"),
    ("ReferenceCopy, tree", ReferenceCopy, 16, "tree"),
    ("ReferenceCopy, tree", ReferenceCopy, 32, "tree"),
    ("ReferenceCopy, tree", ReferenceCopy, 64, "tree"),
)


def main(arguments: list[str] | None = None) -> None:
    """Prints the table of all contenders."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("data", help="the LLMA paper's rag.jsonl")
    parser.add_argument("--tokenizer", required=True, help="a folder or a Hub id")
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)  # the model is too small for more
    tokenizer = load_tokenizer(options.tokenizer)
    answers = llma_rag(options.data, tokenizer)
    model = stand_in_model(len(tokenizer))
    print(f"{'drafts':32} {'nodes':>5} {'MAT':>5} {'accepted':>9} {'us a draft':>11}")
    for name, drafter, nodes, verification in CONTENDERS:
        stats = replay(answers, drafter(), model, nodes, verification)
        print(
            f"{name:32} {nodes:5} {stats.mat:5.2f} {stats.accepted / stats.drafted:9.1%} "
            f"{1e6 * stats.drafting_seconds / stats.forward_passes:11.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
