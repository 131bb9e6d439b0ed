"""Replay: the MAT of drafters on recorded answers.

A logits processor forces a tiny random model to generate each recorded answer, by the same
`generate` that users call. MAT depends only on the text, so that the figure holds for any target
model that would have written it. LLMA's paper measures in the same way (arXiv 2304.04487).

    python benchmarks/replay.py llma_rag.jsonl --tokenizer path/or/hub-id

prints MAT on the retrieval-augmented prompts, where LLMA copies from the documents of each question
(its section 3.1). Triggers (drafts that were verified), accepted tokens and steps are means over
the prompts, as in its Figure 4.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from suites import ForcedText, RecordedAnswer, llma_rag, random_model, table
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import (
    CandidateGenerator,
    PromptLookupCandidateGenerator,
)

from hf_refspec.apps.shared.loading import load_tokenizer
from hf_refspec.drafting.candidates import CandidateChain
from hf_refspec.drafting.drafter import Drafter
from hf_refspec.drafting.reference_copy import ReferenceCopy
from hf_refspec.drafting.stats import SpeculationStats
from hf_refspec.generation.speculate import speculate

# For one question.
NewDrafter: TypeAlias = Callable[[RecordedAnswer], Drafter | CandidateGenerator]


def replay(
    answers: Iterable[RecordedAnswer],
    drafter: Drafter | CandidateGenerator,
    model: PreTrainedModel,
    max_draft_tokens: int | Literal["auto"] = "auto",
    verification: str = "auto",
) -> SpeculationStats:
    """Replays recorded answers, in this order, and sums up the drafter's statistics.

    The model is a random one with at least the answers' vocabulary, tiny for replays of MAT alone;
    the other arguments are those of `generate`.
    """
    if not isinstance(drafter, Drafter):
        drafter = CandidateChain(drafter)
    total = SpeculationStats()
    for answer in answers:
        ids = torch.tensor([answer.prompt_ids + answer.answer_ids])
        model.generate(
            ids[:, : len(answer.prompt_ids)],
            custom_generate=speculate,
            candidate_generator=drafter,
            max_draft_tokens=max_draft_tokens,
            verification=verification,
            max_new_tokens=len(answer.answer_ids),
            do_sample=False,
            eos_token_id=None,
            logits_processor=LogitsProcessorList([ForcedText(ids[0])]),
        )
        total += drafter.stats
    return total


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
    *(("ReferenceCopy, tree", lambda _: ReferenceCopy(), nodes, "tree") for nodes in (16, 32, 64)),
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


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="the LLMA paper's rag.jsonl")
    parser.add_argument("--tokenizer", required=True, help="a folder or a Hub id")
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)  # the model is too small for more
    tokenizer = load_tokenizer(options.tokenizer)
    answers = llma_rag(options.data, tokenizer)
    model = random_model("tiny", len(tokenizer))
    rows = []
    for name, new_drafter, nodes, verification in CONTENDERS:
        stats = measure(answers, new_drafter, model, nodes, verification)
        counts = stats.drafts, stats.accepted, stats.forward_passes
        means = (f"{count / len(answers):.1f}" for count in counts)
        rows.append([name, nodes, f"{stats.mat:.2f}", *means])
    print(table(["drafts", "nodes", "MAT", "triggers", "accepted", "steps"], rows))


if __name__ == "__main__":
    main()
