"""One request on its way through the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from transformers import BatchEncoding, PreTrainedTokenizerBase, StoppingCriteria

from ...drafting.stats import SpeculationStats
from ..shared.text_stream import TextStream
from .interruption import Interruptible
from .stop_strings import StopStrings

# "time": it took longer than a request may take. "cancelled": nobody waits for it any more.
Outcome: TypeAlias = Literal["stop", "length", "time", "cancelled", "error"]
# A piece of the text, or `None`: it has ended.
Listener: TypeAlias = Callable[[str | None], Any]


@dataclass(frozen=True)
class GenerationRequest:
    """What is to be generated.

    Attributes:
        inputs (`BatchEncoding`): The prompt's ids and mask, `(1, n)`.
        options (`dict`): For `generate`.
        seed (`int`, *optional*): Of what is sampled.
        stop_strings (`list[str]`): End the text, and are not in it.
        prediction (`np.ndarray`, integers of shape `(m,)`, *optional*): What the text is expected
            to be.
    """

    inputs: BatchEncoding
    options: dict[str, Any]
    seed: int | None = None
    stop_strings: list[str] = field(default_factory=list)
    prediction: np.ndarray | None = None


class PrefillInterrupt(BaseException):
    """A prompt is not read to its end. Nothing on the way is to take it for a failure."""


class Generation(StoppingCriteria):
    """A request that waits, is decoded or has ended. As a stopping criterion it is told every
    token, and ends the text at a stop string, when time is up, and when nobody waits for it; the
    last two also end its prefill.

    Args:
        request ([`GenerationRequest`]): What is to be generated.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        listener (`Listener`): Is told each piece of the text, and then `None`, in the engine's
            thread.

    Attributes:
        cancelled (`bool`): Set where nobody waits for it any more.
        outcome (`Outcome`, *optional*): Why it ended.
        tokens (`int`): New tokens so far.
        stats ([`SpeculationStats`]): Of its decoding.
    """

    def __init__(
        self, request: GenerationRequest, tokenizer: PreTrainedTokenizerBase, listener: Listener
    ) -> None:
        self.request = request
        self.cancelled = False
        self.outcome: Outcome | None = None
        self.tokens = 0
        self.stats = SpeculationStats()
        self.listener = listener
        self._last_token: int | None = None
        self._ends_at = float("inf")
        self._prefill = ExitStack()
        self._text = TextStream(tokenizer)
        self._stop = StopStrings(request.stop_strings)

    @contextmanager
    def begun(self, max_seconds: float) -> Iterator[None]:
        """It is decoded within."""
        self._ends_at = monotonic() + max_seconds
        with suppress(PrefillInterrupt), self._prefill:
            self._prefill.enter_context(Interruptible(self._check))
            yield

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> Any:  # bool of shape (1,)
        self._prefill.close()  # the passes that follow are short
        self._last_token = int(input_ids[0, -1])
        self.tokens += 1
        self._tell(self._stop.put(self._text.put(self._last_token)))
        self.outcome = "stop" if self._stop.found else self._given_up()
        return torch.full(input_ids.shape[:1], self.outcome is not None, device=input_ids.device)

    def _check(self) -> None:
        self.outcome = self._given_up()
        if self.outcome is not None:
            raise PrefillInterrupt

    def _given_up(self) -> Outcome | None:
        if self.cancelled:
            return "cancelled"
        return "time" if monotonic() > self._ends_at else None

    def end(self, end_tokens: set[int]) -> None:
        """It was decoded to its end.

        Args:
            end_tokens (`set[int]`): The tokens that end a text.
        """
        if not self._stop.found:
            self._tell(self._stop.put(self._text.end()) + self._stop.end())
        if self._stop.found or self._last_token in end_tokens:
            self.outcome = "stop"
        elif self.outcome is None:
            self.outcome = "length"

    def _tell(self, text: str) -> None:
        if text:
            self.listener(text)

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for the outcome."""
        return "stop" if self.outcome == "stop" else "length"

    @property
    def prompt_tokens(self) -> int:
        """The prompt's."""
        return self.request.inputs["input_ids"].shape[1]

    @property
    def accepted_prediction_tokens(self) -> int:
        """Accepted draft tokens that the prediction drafted: it is the first source."""
        return self.stats.sources[0].first if self.stats.sources else 0

    @property
    def rejected_prediction_tokens(self) -> int:
        """Tokens of the prediction that were of no use."""
        prediction = self.request.prediction
        predicted = 0 if prediction is None else len(prediction)
        return max(0, predicted - self.accepted_prediction_tokens)
