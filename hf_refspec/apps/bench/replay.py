"""Replay: the MAT of a drafter on recorded answers.

A logits processor forces a tiny random model to generate each recorded answer, by the same
`generate` that users call. MAT depends only on the text, so that the figure holds for any target
model that would have written it. LLMA's paper measures in the same manner (arXiv 2304.04487).

    python -m hf_refspec.apps.bench.replay llma_rag.jsonl --tokenizer path/or/hub-id
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.generation.candidate_generator import (
    CandidateGenerator,
    PromptLookupCandidateGenerator,
)

from ...drafting.candidates import CandidateChain
from ...drafting.drafter import Drafter
from ...drafting.reference_copy import ReferenceCopy
from ...drafting.stats import SpeculationStats
from ...generation.speculate import speculate
from .models import random_model
from .suites import RecordedAnswer, llma_rag


class ForcedText(LogitsProcessor):
    """Forces a text: at each place its token has the highest score.

    The other tokens keep their scores. If they were forbidden, transformers' prompt look-up, which
    calls the logits processors before it drafts, would learn the text from them.

    What the model would have chosen by itself is kept. Only there it shows whether passes over
    drafts compute the same as plain decoding; the forced text is the same in any case.

    Args:
        ids (`torch.LongTensor` of shape `(length,)`): Prompt and answer.
    """

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids
        # The last call for a place counts: after a rejected draft it is called again.
        self._best: dict[int, torch.Tensor] = {}

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        position = min(input_ids.shape[1], len(self.ids) - 1)
        if input_ids.shape[1] == position:
            self._best[position] = torch.argmax(scores[0])
        forced = scores.clone()
        forced[:, self.ids[position]] = torch.finfo(scores.dtype).max
        return forced

    def unforced(self) -> list[int]:
        """The tokens that the model would have chosen by itself."""
        return [int(self._best[position]) for position in sorted(self._best)]


def stand_in_model(vocab_size: int) -> LlamaForCausalLM:
    """A tiny model, for replays of MAT alone."""
    return random_model("tiny", vocab_size)


def replay(
    answers: Iterable[RecordedAnswer],
    drafter: CandidateGenerator,
    model: PreTrainedModel,
    max_draft_tokens: int | Literal["auto"] = "auto",
    verification: str = "auto",
) -> SpeculationStats:
    """Replays recorded answers with a drafter.

    Args:
        answers (iterable of [`RecordedAnswer`]): In the order that a drafter may learn from.
        drafter (`CandidateGenerator`): A [`Drafter`], or any transformers `CandidateGenerator`.
        model (`PreTrainedModel`): [`stand_in_model`] with the answers' vocabulary, or larger.
        max_draft_tokens (`int` or `"auto"`, *optional*, defaults to `"auto"`): As in `generate`.
        verification (`str`, *optional*, defaults to `"auto"`): As in `generate`.

    Returns:
        [`SpeculationStats`]: The sum over all answers; its `mat` is that of the whole.
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
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
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
