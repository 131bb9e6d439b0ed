"""Rollouts of TRL's trainers: batches of left-padded prompts, between which the weights change."""

import copy
import runpy
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

pytest.importorskip("trl", reason="the extra `integrations` is not installed")

import trl
from datasets import Dataset

import hf_refspec as rs

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "grpo.py"))
SETTINGS = {
    **{"max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 2},
    **{"max_completion_length": 24, "learning_rate": 0.01, "beta": 0.0, "seed": 0},
    "weight_decay": 5.0,  # rollouts that are equal have no advantage over each other
    **{"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no"},
    "disable_tqdm": True,
}
PROMPTS = ["abc abc abc", "the cat and the cat", "one two one two one", "x"]


@dataclass
class Training:
    """A trained copy of a model, and the completions that it was rewarded for."""

    model: PreTrainedModel
    completions: list[str] = field(default_factory=list)
    log: list[dict[str, float]] = field(default_factory=list)

    def reward(self, completions: list[str], **_) -> list[float]:
        self.completions += completions
        return [float(len(set(text))) for text in completions]


@pytest.fixture
def trained(byte_llama, tokenizer, tmp_path):
    """Trains a copy of a random model of bytes for two steps."""

    def train(method: str, drafted: bool, **options) -> Training:
        training = Training(copy.deepcopy(byte_llama))
        trainer = getattr(trl, f"{method}Trainer")(
            model=training.model,
            reward_funcs=training.reward,
            args=getattr(trl, f"{method}Config")(str(tmp_path), **SETTINGS, **options),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=copy.deepcopy(tokenizer),
        )
        if drafted:
            with rs.attach(training.model, max_draft_tokens=8) as attachment:
                EXAMPLE["RolloutCallback"](trainer, attachment)
                trainer.train()
            training.log = trainer.state.log_history
            assert attachment.stats.accepted > 0
        else:
            trainer.train()
        return training

    return train


@pytest.mark.parametrize(("method", "gradient_checkpointing"), [("GRPO", False), ("RLOO", True)])
def test_rollouts_and_what_is_learned_from_them_are_the_same(
    trained, byte_llama, method, gradient_checkpointing
):
    options = {"gradient_checkpointing": gradient_checkpointing, "temperature": 0.7}
    plain, drafted = (trained(method, drafted, **options) for drafted in (False, True))
    assert drafted.completions == plain.completions
    for name, weights in drafted.model.state_dict().items():
        assert torch.equal(weights, plain.model.state_dict()[name])
    assert not torch.equal(drafted.model.lm_head.weight, byte_llama.lm_head.weight)


def test_the_examples_callback_logs_what_became_of_the_rollouts(trained):
    log = trained("GRPO", True, logging_steps=1).log[:2]
    for entry in log:
        assert entry["rollout/mat"] >= 1
        assert 0 < entry["rollout/share_of_step"] <= 1
        assert entry["rollout/seconds"] > 0
        sources = [entry[f"rollout/{name}"] for name in ("ReferenceCopy", "SiblingCopy")]
        assert all(0 <= each <= 1 for each in sources)
    assert log[0]["reward"] > 0  # what the trainer says itself is there


def test_nothing_of_the_weights_before_a_step_changes_a_text_after_it(trained, tokenizer):
    model = trained("GRPO", True, gradient_checkpointing=False).model  # sampled
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    options = {**inputs, "max_new_tokens": 24, "do_sample": False}
    with rs.attach(model, max_draft_tokens=8) as attachment:
        before = model.generate(**options)
        with torch.no_grad():
            for weights in model.parameters():
                weights.mul_(-1)
        after = model.generate(**options)
    assert attachment.stats.accepted > 0
    assert not torch.equal(before, after)
    assert torch.equal(after, model.generate(**options))
