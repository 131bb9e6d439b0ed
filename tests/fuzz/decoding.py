"""Decodes with drafts and without, on two copies of a model, and compares all that a caller sees.

A case is a tiny random model and a few calls, with changes of the model in between; its number
determines all of it.
"""

import itertools
import random
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from hf_refspec.transformers_names import CACHE_NAME
from hf_refspec.warm_up import warmup
from tests.helpers.pass_times import time_is

from .decoding_calls import Answer, Call, draw_call, draw_drafter, make
from .decoding_models import change_error, draw_change, draw_model
from .outcomes import (
    CRASHED,
    DIFFERENT,
    EQUAL,
    PLAIN_RAISED,
    REFUSED,
    TIE,
    Outcome,
    Result,
    in_child,
)

_CLOSE = 1e-4  # of the spread of logits


def run_all(numbers: Sequence[int], root: Path, seconds: float) -> Iterator[Result]:
    """Runs the cases of these numbers, and yields what becomes of each."""
    warmup()  # here, and not in each child again
    for number in numbers:
        case = Case(number)
        title = f"{number}: {case.name} with {case.drafter}, {case.calls} calls"
        yield Result(title, case.name, in_child(case.run, seconds, root / "log"))


class Case:
    """A model on two sides, the drafter of most calls, and the changes and calls up to now, for
    people; `rng` determines what comes next."""

    def __init__(self, number: int) -> None:
        self.number, self.rng = number, random.Random(number)
        self.name, self.build = draw_model(self.rng)
        self.plain, self.drafted = self.build(), self.build()
        self.drafter = draw_drafter(self.rng)
        self.calls = self.rng.choice([1, 1, 2, 2, 3, 4])
        self.done: list[str] = []
        self.accepted = 0

    def run(self) -> Outcome:
        """Runs until the sides come apart, or all calls are made; returns the worst outcome."""
        outcomes: list[Outcome] = []
        # The number determines the seconds on which the budget, and so the drafts, depend.
        seconds = iter(random.Random(self.number).random, None)
        clock = itertools.accumulate(seconds).__next__
        try:
            with time_is(clock):
                while len(outcomes) < self.calls:
                    outcomes.append(self.step())
                    if outcomes[-1].name not in (EQUAL, REFUSED):
                        break
        finally:
            torch.set_num_threads(1)
        worst = Outcome.worst(outcomes)
        return Outcome(worst.name, f"{worst.detail}\n    " + "\n    ".join(self.done))

    def step(self) -> Outcome:
        """A change of the model, perhaps, and a call."""
        for _ in range(self.rng.choice([0, 0, 1, 1, 2]) if self.done else self.rng.random() < 0.2):
            change, seed = draw_change(self.rng), self.rng.getrandbits(32)
            errors = [change_error(change, side, seed) for side in (self.plain, self.drafted)]
            self.done.append(f"{change}({seed})" + (" raised" if errors[0] else ""))
            if errors[1] is not None and errors[0] is None:
                return Outcome(CRASHED, f"{change}: {_told(errors[1])}")
        call = draw_call(self.rng, self.plain, self.drafter)
        self.done.append(str(call))
        befores = self.plain.last, self.drafted.last
        plain = make(self.plain, call)
        if _refuses(plain.error):  # reproducible passes; the drafted call refuses them as well
            make(self.drafted, call)
            self.plain.last, self.drafted.last = befores
            call.drafting["verification"] = "auto"
            plain = make(self.plain, call)
        drafted = make(self.drafted, call, plain)
        self.accepted += drafted.accepted
        outcome = judged(call, plain, drafted, self.is_exact(call))
        if outcome.name == REFUSED:  # and goes on plainly, as a user would
            self.drafted.last = befores[1]
            call.drafter = None
            again = make(self.drafted, call, plain)
            outcome = judged(call, plain, again, self.is_exact(call))
            outcome = Outcome(REFUSED, str(drafted.error)) if outcome.name == EQUAL else outcome
        if not self.is_exact(call):
            self.plain.last = self.drafted.last = None  # they may have come apart
        return outcome

    def is_exact(self, call: Call) -> bool:
        """Whether the ids have to be equal. bfloat16 flips near-ties, and several rows draw their
        random numbers in another order, but reproducible passes are always equal."""
        if call.drafting["verification"] == "reproducible":
            return call.context != "autocast"
        is_long = self.plain.inner.dtype in (torch.float32, torch.float64)
        in_order = call.rows == 1 or not call.options["do_sample"]
        return is_long and in_order and call.context != "autocast"


def judged(call: Call, plain: Answer, drafted: Answer, is_exact: bool) -> Outcome:
    """How a call ended on the two sides."""
    if plain.error is not None:
        return Outcome(PLAIN_RAISED, repr(plain.error))
    if drafted.error is not None:
        refuses = _refuses(drafted.error) and not call.attached and not drafted.streamed
        return Outcome(REFUSED if refuses else CRASHED, _told(drafted.error))
    found = difference(call, plain, drafted) if is_exact else None
    if found is None:
        return Outcome(EQUAL)
    margin = _margin(plain, drafted)
    is_tie = margin < _CLOSE and not call.options["do_sample"]
    texts = f"{plain.ids.tolist()}\n    {drafted.ids.tolist()}"
    return Outcome(TIE if is_tie else DIFFERENT, f"{found}; margin {margin:.1e}\n    {texts}")


_TENSORS = ("scores", "logits", "hidden_states", "attentions")


def difference(call: Call, plain: Answer, drafted: Answer) -> str | None:
    """The first thing that a caller can tell the two sides apart by."""
    expected, found = (visible(call, answer) for answer in (plain, drafted))
    for name, value in expected.items():
        # A cache that goes on holds what other passes have rounded.
        is_reproducible = call.drafting["verification"] == "reproducible" and not call.goes_on
        is_same_bits = is_reproducible and name in _TENSORS
        if not _close(value, found.get(name), 0.0 if is_same_bits else _CLOSE):
            return name
    return None


def visible(call: Call, answer: Answer) -> dict[str, Any]:
    """What a caller sees, by name."""
    output, cache = answer.output, answer.cache
    seen = {"ids": answer.ids, "type": type(output).__name__, "streamed": answer.streamed}
    if not isinstance(output, torch.Tensor):
        # Drafts are verified with a cache even where the model's own configuration has none.
        seen["names"] = sorted({*output.keys(), CACHE_NAME})
        seen |= {name: output.get(name) for name in _TENSORS}
    if call.rows == 1:
        seen |= {"what a processor saw": answer.seen, "random state": answer.random_state}
    if isinstance(cache, Cache):
        with suppress(ValueError):  # no layer attends
            seen["length of the cache"] = int(cache.get_seq_length())
        seen["kinds of layers"] = [type(each).__name__ for each in (cache, *cache.layers)]
        plain_layers = [each for each in cache.layers if type(each) is DynamicLayer]
        seen["entries"] = [(each.keys, each.values) for each in plain_layers]
    return seen


def _close(one: Any, other: Any, apart: float) -> bool:
    """Whether tensors, in tuples or not, differ by this much at most, beside the largest entry."""
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_close(*pair, apart) for pair in pairs)
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return bool(one == other)
    if one.shape != other.shape or not torch.equal(one.isfinite(), other.isfinite()):
        return False
    one, other = (each[each.isfinite()].double() for each in (one, other))
    return not len(one) or bool((one - other).abs().max() <= apart * max(one.abs().max(), 1.0))


def _margin(plain: Answer, drafted: Answer) -> float:
    """By how much plain decoding preferred its token to the drafted one's where the ids first
    differ, relative to the spread of its scores; infinite if there is no such place."""
    width = min(plain.ids.shape[1], drafted.ids.shape[1])
    same_rows = plain.ids.shape[0] == drafted.ids.shape[0]
    apart = plain.ids[:, :width] != drafted.ids[:, :width] if same_rows else torch.empty(0, 2)
    if not (places := apart.nonzero().tolist()):
        return float("inf")
    row, column = min(places, key=lambda place: place[1])
    if not 0 <= column - plain.prompt_length < len(plain.scores):
        return float("inf")
    scores = plain.scores[column - plain.prompt_length][row]
    preferred = scores[plain.ids[row, column]] - scores[drafted.ids[row, column]]
    finite = scores[scores.isfinite()]
    return float(preferred / (finite.max() - finite.min()))


def _refuses(error: Exception | None) -> bool:
    """Whether the package has raised it, and names an argument."""
    if not isinstance(error, (ValueError, TypeError)) or "`" not in str(error):
        return False
    return "hf_refspec" in traceback.extract_tb(error.__traceback__)[-1].filename


def _told(error: Exception) -> str:
    return "".join(traceback.format_exception(error)[-6:])
