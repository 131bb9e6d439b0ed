"""How a call samples, for drafters that estimate what it may choose."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import GenerationConfig


@dataclass(frozen=True)
class Sampling:
    """The options of transformers by which a drafter estimates what is drawn. Others, as min-p, may
    shape the distribution too; the text is plain sampling's with all of them.

    Attributes:
        temperature (`float`): What logits are divided by.
        top_k (`int`): Only so many tokens are drawn; 0 for all.
        top_p (`float`): Only the most probable tokens that add up to so much are drawn.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def of(cls, config: GenerationConfig) -> Sampling | None:
        """The options of a call; `None` if it is greedy."""
        if not config.do_sample:
            return None
        temperature = 1.0 if config.temperature is None else config.temperature
        top_p = 1.0 if config.top_p is None else config.top_p
        return cls(float(temperature), int(config.top_k or 0), float(top_p))
