"""Replay: how many tokens a forward pass would have yielded on texts that were written before.

A tiny random model is made to say each recorded answer by a logits processor, through the very
`generate` that users call. MAT depends on the text alone, not on who computes it, so that this
measures a drafter for any target model that would have written the text. LLMA's paper measures so
(arXiv 2304.04487, Algorithm 2).

    python -m hf_refspec.bench.replay llma_rag.jsonl --tokenizer path/or/hub-id
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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

from ..drafting.candidates import CandidateChain
from ..drafting.drafter import Drafter
from ..drafting.reference_copy import ReferenceCopy
from ..drafting.stats import SpeculationStats
from ..generation.speculate import speculate
from .models import random_model
from .outputs import Output
from .suites import RecordedAnswer, llma_rag


class ForcedText(LogitsProcessor):
    """Makes any model say a given text: each of its tokens in turn has the highest score.

    The others keep theirs. Were they forbidden, transformers' prompt look-up, which asks the logits
    processors before it drafts, would be told the text.

    What the model would have chosen by itself is kept: whether passes over drafts compute the same
    as plain decoding shows there, and nowhere in the forced text.

    Args:
        ids (`torch.LongTensor` of shape `(length,)`): Prompt and answer.
    """

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids
        # A place that a rejected draft has been at is passed once more, with the right text.
        self._best: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        position = min(input_ids.shape[1], len(self.ids) - 1)
        if input_ids.shape[1] == position:
            self._best[position] = torch.max(scores[0], dim=-1)
        forced = scores.clone()
        forced[:, self.ids[position]] = torch.finfo(scores.dtype).max
        return forced

    def unforced(self) -> Output:
        """What the model would have chosen at each place by itself."""
        best = [self._best[position] for position in sorted(self._best)]
        return Output([int(token) for _, token in best], [float(logit) for logit, _ in best])


def stand_in_model(vocab_size: int) -> LlamaForCausalLM:
    """A model whose forward pass costs next to nothing, for replays."""
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
        answers (iterable of [`RecordedAnswer`]): In order; a drafter that remembers may use it.
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


@dataclass(frozen=True)
class Contender:
    """A row of the table: what drafts, how many nodes, and how they are verified."""

    name: str
    make: Callable[[], CandidateGenerator]
    max_draft_tokens: int
    verification: str = "auto"


CONTENDERS = (
    Contender(
        "transformers' prompt look-up",
        lambda: PromptLookupCandidateGenerator(num_output_tokens=10, max_length=2**31),
        10,
        "chain",
    ),
    Contender("LLMA (n=1, k=18)", lambda: ReferenceCopy(mode="llma", copy_length=18), 18, "chain"),
    Contender("ReferenceCopy, chain", ReferenceCopy, 18, "chain"),
    Contender("ReferenceCopy, tree", ReferenceCopy, 16, "tree"),
    Contender("ReferenceCopy, tree", ReferenceCopy, 32, "tree"),
    Contender("ReferenceCopy, tree", ReferenceCopy, 64, "tree"),
)


def main(arguments: list[str] | None = None) -> None:
    """Prints the table of all contenders."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("data", help="the LLMA paper's rag.jsonl")
    parser.add_argument("--tokenizer", required=True, help="a folder or a Hub id")
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)  # the stand-in is too small to share out
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    answers = llma_rag(options.data, tokenizer)
    model = stand_in_model(len(tokenizer))
    print(f"{'drafts':32} {'nodes':>5} {'MAT':>5} {'accepted':>9} {'us a draft':>11}")
    for contender in CONTENDERS:
        stats = replay(
            answers, contender.make(), model, contender.max_draft_tokens, contender.verification
        )
        print(
            f"{contender.name:32} {contender.max_draft_tokens:5} {stats.mat:5.2f} "
            f"{stats.accepted / stats.drafted:9.1%} "
            f"{1e6 * stats.drafting_seconds / stats.forward_passes:11.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
