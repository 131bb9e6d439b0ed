"""Rollouts of a policy that is trained meanwhile: MAT, whose drafts were accepted, and the time.

    OMP_NUM_THREADS=1 python benchmarks/rollouts.py [--temperature T] [--learning-rate RATE]

Each step samples G rollouts of one prompt, plainly and drafted, by turns first; the ids must be the
same. Then the policy makes a step of GRPO (advantages within the group, AdamW) towards correct
sums. A prompt comes again every eight steps, an epoch. A row of the table is an epoch: MAT; the
fraction of the new tokens that each source has drafted, and none before it; and how many times as
fast as plain decoding the drafted rollouts were.
"""

from __future__ import annotations

import argparse
import re
import sys
from statistics import median
from time import perf_counter

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_refspec as rs
from hf_refspec.apps.bench.report import table
from hf_refspec.apps.cli.arguments import positive
from hf_refspec.apps.shared.loading import load_model, load_tokenizer
from hf_refspec.drafting.drafter import Drafter
from hf_refspec.drafting.stats import SpeculationStats
from hf_refspec.generation.warmup import warmup
from hf_refspec.smollm2 import default_model

SUMS = [(17, 25), (8, 34), (51, 19), (26, 47), (12, 30), (63, 9), (45, 38), (21, 77)]
QUESTION = "What is {} + {}? Show your steps, then write the result as: Answer: N"
SOURCES = ("ReferenceCopy", "SiblingCopy", "RetrievalCache", "TokenRecycling")


class Rollouts:
    """A policy, its drafter, and what came of each step."""

    def __init__(self, model: PreTrainedModel, tok: PreTrainedTokenizerBase, args) -> None:
        self.model, self.tok, self.args = model, tok, args
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
        history = rs.RetrievalCache(top_k=2 * args.rollouts)
        self.drafter = rs.ReferenceCopy() | rs.SiblingCopy() | history | rs.TokenRecycling()
        self.stats: list[SpeculationStats] = []
        self.speeds: list[float] = []
        self.rewards: list[float] = []

    def step(self, number: int) -> None:
        """Samples the rollouts of a prompt, and learns from them."""
        a, b = SUMS[number % len(SUMS)]
        inputs = self.tok.apply_chat_template(
            [{"role": "user", "content": QUESTION.format(a, b)}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        plainly_first = number % 2 == 0
        found = {}
        for drafter in (None, self.drafter) if plainly_first else (self.drafter, None):
            torch.manual_seed(number)
            found[drafter is None] = self._sampled(inputs, drafter)
        (plain, plain_seconds), (ids, seconds) = found[True], found[False]
        if not torch.equal(plain, ids):
            raise SystemExit(f"step {number}: other ids than plain decoding")
        self.stats.append(self.drafter.stats)
        self.speeds.append(plain_seconds / seconds)
        self._learn(ids, inputs["input_ids"].shape[1], a + b)

    def _sampled(self, inputs, drafter: Drafter | None) -> tuple[torch.Tensor, float]:
        began = perf_counter()
        ids = self.model.generate(
            **inputs,
            candidate_generator=drafter,
            do_sample=True,
            temperature=self.args.temperature,
            top_k=0,
            num_return_sequences=self.args.rollouts,
            max_new_tokens=self.args.max_new_tokens,
        )
        return ids, perf_counter() - began

    def _learn(self, ids: torch.Tensor, prompt: int, right: int) -> None:
        texts = self.tok.batch_decode(ids[:, prompt:], skip_special_tokens=True)
        numbers = [re.findall(r"\d+", text) for text in texts]
        rewards = torch.tensor([float(bool(each) and int(each[-1]) == right) for each in numbers])
        rewards += torch.tensor([0.2 * ("Answer:" in text) for text in texts])
        self.rewards.append(float(rewards.mean()))
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        logits = self.model(ids).logits[:, prompt - 1 : -1] / self.args.temperature
        losses = nn.functional.cross_entropy(logits.mT, ids[:, prompt:], reduction="none")
        kept = (ids[:, prompt:] != self.tok.pad_token_id).float()
        ((losses * kept).sum(dim=1) / kept.sum(dim=1) * advantages).mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def row(self, steps: slice) -> list[str]:
        """A row of the table."""
        stats = SpeculationStats()
        for each in self.stats[steps]:
            stats += each
        shares = [100 * source.first / stats.tokens for source in stats.sources]
        speeds = self.speeds[steps]
        return [
            f"{steps.start + 1}-{min(steps.stop, len(self.stats))}",
            f"{stats.mat:.2f}",
            *(f"{share:.0f} %" for share in shares),
            f"{median(speeds):.2f}x",
            f"{min(speeds):.2f}x",
            f"{sum(self.rewards[steps]) / len(speeds):.2f}",
        ]


def main(arguments: list[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model", help="a folder or a Hub id; default: SmolLM2-135M-Instruct")
    add("--steps", type=positive, default=50, metavar="N")
    add("--rollouts", type=positive, default=8, metavar="G")
    add("--max-new-tokens", type=positive, default=96, metavar="N")
    add("--temperature", type=float, default=1.0, metavar="T")
    add("--learning-rate", type=float, default=1e-6, metavar="RATE")
    args = parser.parse_args(arguments)
    warmup()
    name = args.model or default_model()
    rollouts = Rollouts(load_model(name, "cpu", torch.float32), load_tokenizer(name), args)
    for number in range(args.steps):
        rollouts.step(number)
        print(f"step {number + 1}: {' '.join(rollouts.row(slice(number, number + 1)))}", flush=True)
    epochs = [slice(i, i + len(SUMS)) for i in range(0, args.steps, len(SUMS))]
    heads = ["steps", "MAT", *SOURCES, "speed", "least", "reward"]
    print(table(heads, [rollouts.row(each) for each in epochs]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
