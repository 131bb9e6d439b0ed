"""How long forward passes take, as a test says, and not as the clock does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from hf_refspec.generation import budget as budgets
from hf_refspec.generation.loop import Loop
from hf_refspec.generation.pass_costs import PassCosts


class TimedPasses(PassCosts):
    """What is known of the costs of passes, of all models together.

    Attributes:
        sizes: The tokens of each pass so far, without those over prompts.
        total: How long they took.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.total = 0.0

    def record(self, tokens: int, seconds: float, length: int = 0) -> None:
        self.sizes.append(tokens)
        self.total += seconds
        super().record(tokens, seconds, length)


@contextmanager
def passes_take(seconds: Callable[[int], float]) -> Iterator[TimedPasses]:
    """Has a pass take as long as a formula of its tokens says, and all else no time."""
    costs, forward, now = TimedPasses(), Loop._forward, 0.0

    def timed(loop, steps, records=False):
        nonlocal now
        result = forward(loop, steps, records)
        now += seconds(result.pass_tokens)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_forward", timed)
        # Each loop sets its clock, which this drops.
        patch.setattr(Loop, "clock", property(lambda loop: lambda: now, lambda loop, clock: None))
        patch.setattr(budgets, "pass_costs", lambda model, kind_of_pass: costs)
        yield costs
