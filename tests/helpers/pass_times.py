"""How long forward passes take, as a test says, and not as the clock does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from hf_refspec.generation import accept, budget, loop, plan
from hf_refspec.generation.budget import PassCosts
from hf_refspec.verification import verifier
from hf_refspec.verification.verifier import Verifier


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

    def record(self, tokens: int, seconds: float, length: int = 0, plain: bool = False) -> None:
        self.sizes.append(tokens)
        self.total += seconds
        super().record(tokens, seconds, length, plain)


class MadeUp(PassCosts):
    """Costs by a formula of the number of tokens, known from the first pass on."""

    def __init__(self, formula: Callable[[int], float]) -> None:
        super().__init__()
        self.formula = formula

    def record(self, tokens, seconds, length=0, plain=False):
        pass

    def wants_plain_step(self, length):
        return False

    def seconds(self, tokens, length):
        return np.vectorize(self.formula, otypes=[float])(tokens)

    def dearest(self, tokens):
        return self.seconds(tokens, 0) / self.formula(int(tokens[0]))


@contextmanager
def time_is(clock: Callable[[], float]) -> Iterator[None]:
    """The time of steps is that of this clock."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (accept, loop, plan, verifier):
            patch.setattr(module, "perf_counter", clock)
        yield


@contextmanager
def passes_take(
    seconds: Callable[[int], float], costs: PassCosts | None = None
) -> Iterator[TimedPasses]:
    """Has a pass take as long as a formula of its tokens says, and all else no time."""
    costs, forward, now = costs or TimedPasses(), Verifier.forward, 0.0

    def timed(self, *args, **kwargs):
        nonlocal now
        result = forward(self, *args, **kwargs)
        now += seconds(result.pass_tokens)
        return result

    with time_is(lambda: now), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Verifier, "forward", timed)
        patch.setattr(budget, "pass_costs", lambda model, kind_of_pass: costs)
        yield costs
