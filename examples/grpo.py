"""GRPO with drafted rollouts, and without: the same completions, the same weights bit by bit.

The model learns to answer sums with the bare number; the reward can be checked. Needs `pip install
trl`; 24 steps with four rollouts of each of two prompts take a few minutes on a CPU.

python examples/grpo.py --steps 24
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

import hf_refspec as rs

SUMS = [(17, 25), (8, 34), (51, 19), (26, 47), (12, 30), (63, 9), (45, 38), (21, 77)]


@dataclass
class Run:
    """A trained model, its rollouts, and what they took."""

    model: PreTrainedModel
    completions: list[str] = field(default_factory=list)
    log: list[dict[str, float]] = field(default_factory=list)
    rollout_seconds: float = 0.0


def question(a: int, b: int) -> str:
    return f"What is {a} + {b}? Show your steps, then write the result as: Answer: N"


def train(name: str, steps: int, rollouts: int, tokens: int, drafted: bool) -> Run:
    """Trains the model from the start, with the same seed each time."""
    run = Run(AutoModelForCausalLM.from_pretrained(name, dtype="float32"))

    def reward(completions: list[list[dict[str, str]]], result: list[int], **_) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        run.completions += texts
        found = [re.findall(r"\d+", text) for text in texts]
        return [
            float(bool(numbers) and int(numbers[-1]) == right) + 0.2 * ("Answer:" in text)
            for numbers, right, text in zip(found, result, texts, strict=True)
        ]

    generate = run.model.generate

    def timed(*args, **kwargs):
        began = perf_counter()
        output = generate(*args, **kwargs)
        run.rollout_seconds += perf_counter() - began
        return output

    run.model.generate = timed
    with TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=run.model,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=2 * rollouts,
                num_generations=rollouts,
                max_completion_length=tokens,
                learning_rate=1e-6,
                steps_per_generation=1,
                beta=0.0,
                logging_steps=1,
                seed=0,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(
                [
                    {"prompt": [{"role": "user", "content": question(a, b)}], "result": a + b}
                    for a, b in SUMS
                ]
            ),
            processing_class=AutoTokenizer.from_pretrained(name),
        )
        trainer.remove_callback(PrinterCallback)
        if not drafted:
            trainer.train()
            return run
        history = rs.RetrievalCache(top_k=2 * rollouts)  # of earlier epochs
        drafter = rs.ReferenceCopy() | rs.SiblingCopy() | history | rs.TokenRecycling()
        with rs.attach(run.model, drafter) as attachment:
            rs.RolloutCallback(trainer, attachment)
            trainer.train()
    run.log = [entry for entry in trainer.state.log_history if "rollout/mat" in entry]
    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a folder or a Hub id; SmolLM2-135M-Instruct by default")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    rs.warmup()
    shape = args.model or rs.default_model(), args.steps, args.rollouts, args.tokens
    plain, drafted = (train(*shape, drafted) for drafted in (False, True))
    weights = zip(plain.model.parameters(), drafted.model.parameters(), strict=True)
    print(f"the same completions: {drafted.completions == plain.completions}")
    print(f"the same weights: {all(torch.equal(one, other) for one, other in weights)}")
    print(f"rollouts: {plain.rollout_seconds:.1f} s plain, {drafted.rollout_seconds:.1f} s drafted")
    print("MAT by step:", *(f"{entry['rollout/mat']:.2f}" for entry in drafted.log))


if __name__ == "__main__":
    main()
