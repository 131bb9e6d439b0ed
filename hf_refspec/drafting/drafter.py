"""The contract of everything that drafts: begin, draft, observe, fork, end."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from transformers import GenerationConfig

from .calibration import PRIOR_EXPONENT, Calibration
from .observation import Observation
from .stats import DraftStats
from .tree import DraftTree

if TYPE_CHECKING:
    from typing_extensions import Self

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
        speed (callable, *optional*): Returns the expected tokens per second of the best pass over
            nodes with given estimates (`np.ndarray`, float32), drafted in given seconds; for a
            drafter that takes much time. `None` where the call names the number of nodes.
        noise (callable, *optional*): The random numbers `(vocab_size,)` of each token behind the
            text, counted from 0: of a sampled call, which chooses the argmax of its probabilities
            divided by them.
    """

    sampling: Sampling | None = None
    chain: bool = False
    speed: Speed | None = None
    noise: Noise | None = None


class Drafter:
    """Drafts the tokens that may come next, for the target model to verify.

    One call of `generate` is `begin -> (draft -> observe)* -> end`. A subclass implements `draft`,
    and what it needs of the others. A drafter serves one call at a time; make one per thread. In a
    call with several rows each row has a `fork` of its own. It can be pickled and copied between
    calls. A [`Blend`] has further uses for a [`PathDrafter`].

    Attributes:
        stats (`DraftStats`): Of the last call.
        call ([`Call`]): The options of the present call, set before it begins.
        calibration ([`Calibration`]): The outcomes of its estimates so far; its forks share it.
        decides_length (`bool`): Whether a call without `max_draft_tokens` verifies its drafts as
            they are, and not only what pays.
        observed_top_k (`int`): How many of the target's best next tokens it needs at each verified
            node; 0 if none.
        prompt_fraction (`float`): The most that an observation of the prompt may cost, as a
            fraction of the prefill; 0 if none is needed.
    """

    stats: DraftStats
    call: Call
    calibration: Calibration
    decides_length: bool = False
    observed_top_k: int = 0
    prompt_fraction: float = 0.0

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Not in __init__: a subclass may forget to call it, and copies and pickles do not call it.
        drafter = super().__new__(cls)
        drafter.stats = DraftStats()
        drafter.call = Call()
        drafter.calibration = Calibration(PRIOR_EXPONENT)
        return drafter

    @property
    def sources(self) -> Sequence[Drafter]:
        """The drafters that draft in its calls: itself, or the sources of a [`Blend`]."""
        return [self]

    def check(self, vocab_size: int, processors: Sequence[Any] | None = None) -> None:
        """Checks a call before any work starts. Raises a ValueError if it would draft ids outside
        of the target's vocabulary; `processors` are the call's logits processors, where known."""

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        """Starts a call. If the kernels are not loaded yet, it comes after the first token or later
        in the call, and `observe` then receives the tokens emitted before.

        Args:
            prompt_ids (`np.ndarray`, int64 of shape `(n,)`): The prompt.
            vocab_size (`int`): The target model's; drafts must stay below it.
        """

    def draft(self, budget: int) -> DraftTree:
        """Drafts what may follow the prompt and all observed tokens, at most `budget` nodes."""
        raise NotImplementedError(f"{type(self).__name__} must implement draft(budget)")

    def observe(self, observation: Observation) -> None:
        """Receives the result of a forward pass of the target model.

        Args:
            observation ([`Observation`]): The emitted tokens, the verified tree and what the target
                expected after each of its nodes; or, if `prompt_fraction` is above 0, what it
                expected inside the prompt.
        """

    def fork(self) -> Drafter:
        """Returns a drafter for another row of the same call, before `begin`.

        By default a deep copy that shares `calibration`, so that the outcomes of each row's drafts
        correct the estimates of all. Override it to share what is large, or what all rows add to.
        """
        fork = copy.deepcopy(self)
        fork.calibration = self.calibration
        return fork

    def source_texts(self) -> list[tuple[str, Sequence[Any]]]:
        """The texts that it copies from, for `stats.copied`: each source's name and its arrays,
        which no later call may change. Called before `end`; none by default."""
        return []

    def end(self) -> None:
        """Ends the call, also after an exception (one from `begin` too)."""

    def __or__(self, other: Any) -> Drafter:
        """`a | b` drafts from both, see [`Blend`]; one may be a datastore, or `"auto"`."""
        return _blend(self, other)

    def __ror__(self, other: Any) -> Drafter:
        return _blend(other, self)

    def __repr__(self) -> str:
        """Its arguments that differ from the defaults: numbers and strings alone."""
        arguments = []
        for parameter in inspect.signature(type(self).__init__).parameters.values():
            value = getattr(self, parameter.name, parameter.default)
            if isinstance(value, (int, float, str)) and value != parameter.default:
                arguments.append(f"{parameter.name}={value!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for of_a_call in ("_in_use", "call", "stats"):
            state.pop(of_a_call, None)
        return state


def checked_draft(drafter: Drafter, budget: int, vocab_size: int) -> DraftTree:
    """A drafter's draft, as a single path where its call needs one. Raises a ValueError if the
    draft is not valid, or has more than `budget` nodes."""
    draft: Any = drafter.draft(budget)
    if not isinstance(draft, DraftTree) or len(draft) > budget:
        drafted = len(draft) if isinstance(draft, DraftTree) else repr(draft)
        raise ValueError(
            f"{type(drafter).__name__} was asked for a DraftTree of at most {budget} nodes, but "
            f"drafted {drafted}."
        )
    draft = draft.checked(vocab_size)
    return draft if not drafter.call.chain or draft.is_chain else draft.best_chain()


def _blend(first: Any, second: Any) -> Drafter:
    from .blend import Blend  # builds on this module

    return Blend([first, second])


@contextmanager
def owned(drafter: Drafter) -> Iterator[None]:
    """Keeps a drafter and its sources from other calls; raises a RuntimeError if one has any."""
    with ExitStack() as stack:
        for used in dict.fromkeys([drafter, *drafter.sources]):
            lock: threading.Lock = used.__dict__.setdefault("_in_use", threading.Lock())
            if not lock.acquire(blocking=False):
                raise RuntimeError(
                    f"this {type(used).__name__} is in use by another call; make one drafter per "
                    "thread, or fork() it"
                )
            stack.callback(lock.release)
        yield
