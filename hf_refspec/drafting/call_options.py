"""The options of a call of `generate` that its drafters need."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from transformers import GenerationConfig

Speed: TypeAlias = Callable[[np.ndarray, float], float]
Noise: TypeAlias = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Sampling:
    """The options of a sampled call by which a drafter estimates what is drawn. Other options, such
    as min-p, may shape the distribution as well; with all of them the text is plain sampling's.

    Attributes:
        temperature (`float`): What logits are divided by.
        top_k (`int`): How many of the most probable tokens may be drawn; 0 for all.
        top_p (`float`): The probability up to which the most probable tokens may be drawn.
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


@dataclass
class Call:
    """The options of a call of `generate` that its drafters need.

    Attributes:
        sampling ([`Sampling`], *optional*): How it samples; `None` if it is greedy.
        chain (`bool`): Whether it verifies a single path. The best path of a draft is verified
            then; a drafter may do better by growing one path from the start.
        depth (`int`): How deep a draft is verified: no text needs more tokens.
        speed (callable, *optional*): Returns the expected tokens per second of the best pass over
            nodes with given estimates (`np.ndarray`, float32), drafted in given seconds; for a
            drafter that takes much time. `None` where the call names the number of nodes.
        noise (callable, *optional*): The random numbers `(vocab_size,)` of each token behind the
            text, counted from 0: of a sampled call, which chooses the argmax of its probabilities
            divided by them.
    """

    sampling: Sampling | None = None
    chain: bool = False
    depth: int = sys.maxsize
    speed: Speed | None = None
    noise: Noise | None = None
