"""What a drafter does for the rollouts of a trainer, in the trainer's own log."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from .attachment import Attachment


class RolloutCallback(TrainerCallback):
    """Reports the rollouts of a trainer (GRPO, RLOO, ...) in whatever it logs.

        attachment = rs.attach(trainer.model)
        rs.RolloutCallback(trainer, attachment)
        trainer.train()

    It stands before the trainer's other callbacks, so that what reports to a service has it too.
    Each entry of the log, of the steps since the one before, gets `rollout/mat`;
    `rollout/seconds`, what `generate` took; `rollout/share_of_step`, the fraction of the steps'
    time; and for each source of a blend, as `rollout/SiblingCopy`, the fraction of the new tokens
    that it has drafted and no source before it.

    Args:
        trainer (`Trainer`): What trains the model.
        attachment ([`Attachment`]): What [`attach`] returned for the model.
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
        state.log_history[-1].update(named)  # it was copied before
        self._reported, self._step_seconds = now, 0.0

    def _counts(self) -> dict[str, float]:
        """All calls so far."""
        stats = self._attachment.stats
        passes = sum(stats.accepted_lengths)  # of each row
        counts = {"tokens": stats.tokens, "passes": passes, "seconds": stats.seconds}
        return counts | {source.name: source.first for source in stats.sources}
