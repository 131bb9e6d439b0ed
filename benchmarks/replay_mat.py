"""MAT of several drafters on the retrieval-augmented prompts.

    python benchmarks/replay_mat.py llma_rag.jsonl --tokenizer path/or/hub-id [--grid]

LLMA copies from the documents of each question, as in its paper (arXiv 2304.04487, section 3.1).
Triggers (drafts that were verified), accepted tokens and steps are means over the prompts, as in
its Figure 4. `--grid` prints LLMA's MAT for match lengths n and copy lengths k, as its Figure 3.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeAlias

import torch
from replay import replay, stand_in_model
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import (
    CandidateGenerator,
    PromptLookupCandidateGenerator,
)

from hf_refspec.apps.bench.suites import RecordedAnswer, llma_rag
from hf_refspec.apps.shared.loading import load_tokenizer
from hf_refspec.drafting.reference_copy import ReferenceCopy
from hf_refspec.drafting.stats import SpeculationStats

MATCH_LENGTHS = (1, 2, 3, 4)
COPY_LENGTHS = (2, 6, 10, 14, 18, 22, 26, 30)

NewDrafter: TypeAlias = Callable[[RecordedAnswer], CandidateGenerator]  # for one question


def llma(match_length: int, copy_length: int) -> NewDrafter:
    """LLMA's algorithm."""
    return lambda answer: ReferenceCopy(
        answer.references, match_length=match_length, copy_length=copy_length, mode="llma"
    )


# The rows of the table: a name, the drafter, the number of draft nodes, and the verification.
CONTENDERS: tuple[tuple[str, NewDrafter, int, str], ...] = (
    (
        "transformers' prompt look-up",
        lambda _: PromptLookupCandidateGenerator(num_output_tokens=10, max_length=2**31),
        10,
        "chain",
    ),
    ("LLMA (n=1, k=18)", llma(1, 18), 18, "chain"),
    ("ReferenceCopy, chain", lambda _: ReferenceCopy(), 18, "chain"),
    ("ReferenceCopy, tree", lambda _: ReferenceCopy(), 16, "tree"),
    ("ReferenceCopy, tree", lambda _: ReferenceCopy(), 32, "tree"),
    ("ReferenceCopy, tree", lambda _: ReferenceCopy(), 64, "tree"),
)


def measure(
    answers: list[RecordedAnswer],
    new_drafter: NewDrafter,
    model: PreTrainedModel,
    nodes: int,
    verification: str,
) -> SpeculationStats:
    """Replays the answers, each with a new drafter, and sums up the statistics."""
    total = SpeculationStats()
    for answer in answers:
        total += replay([answer], new_drafter(answer), model, nodes, verification)
    return total


def print_contenders(answers: list[RecordedAnswer], model: PreTrainedModel) -> None:
    """Prints the table of all contenders."""
    print(
        f"{'drafts':32} {'nodes':>5} {'MAT':>5} {'triggers':>8} {'accepted':>8} {'steps':>6} "
        f"{'of drafted':>10} {'us a draft':>10}"
    )
    for name, new_drafter, nodes, verification in CONTENDERS:
        stats = measure(answers, new_drafter, model, nodes, verification)
        triggers, accepted, steps = (
            count / len(answers) for count in (stats.drafts, stats.accepted, stats.forward_passes)
        )
        print(
            f"{name:32} {nodes:5} {stats.mat:5.2f} {triggers:8.1f} {accepted:8.1f} {steps:6.1f} "
            f"{stats.accepted / stats.drafted:10.1%} "
            f"{1e6 * stats.drafting_seconds / stats.forward_passes:10.0f}",
            flush=True,
        )


def print_grid(answers: list[RecordedAnswer], model: PreTrainedModel) -> None:
    """Prints LLMA's MAT, a row for each match length and a column for each copy length."""
    print("n \\ k" + "".join(f"{k:6}" for k in COPY_LENGTHS))
    for n in MATCH_LENGTHS:
        print(f"{n:5}", end="")
        for k in COPY_LENGTHS:
            print(f"{measure(answers, llma(n, k), model, k, 'chain').mat:6.2f}", end="", flush=True)
        print()


def main(arguments: list[str] | None = None) -> None:
    """Prints one of the two tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", help="the LLMA paper's rag.jsonl")
    parser.add_argument("--tokenizer", required=True, help="a folder or a Hub id")
    parser.add_argument("--grid", action="store_true", help="LLMA's MAT by n and k, in minutes")
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)  # the model is too small for more
    tokenizer = load_tokenizer(options.tokenizer)
    answers = llma_rag(options.data, tokenizer)
    model = stand_in_model(len(tokenizer))
    (print_grid if options.grid else print_contenders)(answers, model)


if __name__ == "__main__":
    main()
