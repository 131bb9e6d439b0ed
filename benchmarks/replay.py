"""Replay: the MAT of drafters on recorded answers, without a model.

MAT depends on the texts alone, so that the figure holds for any target model that would have
written them. LLMA's paper measures in the same way (arXiv 2304.04487).

    python benchmarks/replay.py llma_rag.jsonl --tokenizer path/or/hub-id

prints MAT on the retrieval-augmented prompts, where LLMA copies from the documents of each question
(its section 3.1). Triggers (drafts that were verified), accepted tokens and steps are means over
the prompts, as in its Figure 4.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from suites import RecordedAnswer, llma_rag, table
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_refspec.apps.bench.measure import replay
from hf_refspec.apps.shared.loading import load_tokenizer
from hf_refspec.drafting.candidates import CandidateChain
from hf_refspec.drafting.drafter import Drafter
from hf_refspec.drafting.reference_copy import ReferenceCopy
from hf_refspec.drafting.stats import SpeculationStats

# For one question.
NewDrafter: TypeAlias = Callable[[RecordedAnswer], Drafter]


def look_up(_: RecordedAnswer) -> Drafter:
    """Transformers' prompt look-up."""
    return CandidateChain(PromptLookupCandidateGenerator(num_output_tokens=10, max_length=2**31))


def llma(answer: RecordedAnswer) -> Drafter:
    """LLMA's algorithm with n = 1 and k = 18, on the documents of the question."""
    return ReferenceCopy(answer.references, match_length=1, copy_length=18, mode="llma")


# The rows of the table: a name, the drafter, and the number of draft nodes.
CONTENDERS: tuple[tuple[str, NewDrafter, int], ...] = (
    ("transformers' prompt look-up", look_up, 10),
    ("LLMA (n=1, k=18)", llma, 18),
    *(("ReferenceCopy", lambda _: ReferenceCopy(), nodes) for nodes in (16, 64)),
)


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="the LLMA paper's rag.jsonl")
    parser.add_argument("--tokenizer", required=True, help="a folder or a Hub id")
    options = parser.parse_args(arguments)
    tokenizer = load_tokenizer(options.tokenizer)
    answers = llma_rag(options.data, tokenizer)
    rows = []
    for name, new_drafter, nodes in CONTENDERS:
        stats = SpeculationStats()
        for each in answers:
            pair = each.prompt_ids, each.answer_ids
            stats += replay([pair], new_drafter(each), len(tokenizer), nodes)
        counts = stats.drafts, stats.accepted, stats.forward_passes
        means = (f"{count / len(answers):.1f}" for count in counts)
        rows.append([name, nodes, f"{stats.mat:.2f}", *means])
    print(table(["drafts", "nodes", "MAT", "triggers", "accepted", "steps"], rows))


if __name__ == "__main__":
    main()
