"""GRPO with drafted rollouts and with plain ones: equal completions, and weights equal bit by bit.

The model learns to answer sums with the bare number, which a rule can reward. It needs `pip install
trl`; 24 steps with four rollouts of each of two prompts take a few minutes on a CPU.

python examples/grpo.py --steps 24
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer

import hf_refspec as rs
from hf_refspec.attachment import Attachment

SUMS = [(17, 25), (8, 34), (51, 19), (26, 47), (12, 30), (63, 9), (45, 38), (21, 77)]


@dataclass
class Run:
    """A trained model, its rollouts, and what they took."""

    model: PreTrainedModel
    completions: list[str] = field(default_factory=list)
    log: list[dict[str, float]] = field(default_factory=list)
    rollout_seconds: float = 0.0


class RolloutCallback(TrainerCallback):
    """Reports the rollouts of a trainer (GRPO, RLOO, ...) in whatever it logs.

    It stands before the trainer's other callbacks, so that those that report to a service have its
    figures too. Each log entry covers the steps since the last one: `rollout/mat`;
    `rollout/seconds`, the time of `generate`; `rollout/share_of_step`, its fraction of the steps'
    time; and for each source of a blend, as `rollout/SiblingCopy`, the fraction of the new tokens
    that it drafted and no source before it.
    """

    def __init__(self, trainer: Trainer, attachment: Attachment) -> None:
        self._attachment = attachment
        self._step_seconds = self._began = 0.0
        self._reported = self._counts()
        trainer.callback_handler.callbacks.insert(0, self)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._began = perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._step_seconds += perf_counter() - self._began

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        now = self._counts()
        new = {name: count - self._reported.get(name, 0) for name, count in now.items()}
        if logs is None or new["tokens"] == 0 or self._step_seconds == 0:
            return
        figures = {
            "mat": new["tokens"] / new["passes"],
            "seconds": new["seconds"],
            "share_of_step": new["seconds"] / self._step_seconds,
        }
        sources = new.keys() - {"tokens", "passes", "seconds"}
        figures |= {name: new[name] / new["tokens"] for name in sorted(sources)}
        named = {f"rollout/{name}": round(figure, 4) for name, figure in figures.items()}
        logs.update(named)
        state.log_history[-1].update(named)  # the trainer has copied `logs` into it already
        self._reported, self._step_seconds = now, 0.0

    def _counts(self) -> dict[str, float]:
        """All calls so far."""
        stats = self._attachment.stats
        passes = sum(stats.accepted_lengths)  # over one row each
        counts = {"tokens": stats.tokens, "passes": passes, "seconds": stats.seconds}
        return counts | {source.name: source.first for source in stats.sources}


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
        history = rs.SessionDrafts(top_k=2 * rollouts)  # of earlier epochs
        drafter = rs.ReferenceCopy() | rs.SiblingCopy() | history | rs.TokenRecycling()
        with rs.attach(run.model, drafter) as attachment:
            RolloutCallback(trainer, attachment)
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
