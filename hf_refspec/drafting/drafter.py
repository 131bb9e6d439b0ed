"""The base class of everything that drafts: begin, draft, observe, fork, end."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from transformers import GenerationConfig

from .assisted import ANY_VOCABULARY, AssistedDrafter
from .calibration import PRIOR_EXPONENT, Calibration
from .compilation import drafting_kernels
from .observation import Observation
from .payoff import Prices
from .stats import SpeculationStats
from .tree import DraftTree

if TYPE_CHECKING:
    from typing_extensions import Self

NO_PATH = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Sampling:
    """How a call samples: the options of transformers by which a drafter estimates what is drawn.
    Others, as min-p, may shape the distribution too; the text is plain sampling's with all of them.

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


class Drafter(AssistedDrafter):
    """Drafts the tokens that may come next, for the target model to verify.

    One call of `generate` is `begin -> (draft -> observe)* -> end`. A subclass implements `draft`,
    and what it needs of the others. A drafter serves one call at a time; make one per thread. In a
    call with several rows each row has a `fork` of its own. It can be pickled and copied between
    calls.

    Attributes:
        stats (`SpeculationStats`): Of the last call.
        assisted_draft_tokens (`int`): The longest draft inside transformers' own assisted
            decoding, which sets no budget (10, as its prompt look-up has).
        decides_length (`bool`): Whether a call without `max_draft_tokens` verifies drafts as they
            are; otherwise it verifies only what pays.
        calibration ([`Calibration`]): The outcomes of its estimates so far; its forks share it.
        row_calibration ([`Calibration`]): Of the present row, on top of what it says.
        sampling ([`Sampling`], *optional*): How the call samples, known when it begins; `None` if
            it is greedy.
        costly (`bool`): Whether it runs a model to draft: a blend asks it after the others.
        prunes (`bool`): Whether it knows what cannot follow: a blend lets it `prune` the others'
            trees, and continue them.
        prices ([`Prices`]): What time is worth to the call, for a costly drafter.
        known ([`DraftTree`]): In a blend, what the sources before a costly one have drafted.
        observed_top_k (`int`): How many of the target's best next tokens at each verified node it
            needs; 0 if none.
        prompt_fraction (`float`): What an observation of the prompt may cost at most, as a
            fraction of the prefill; 0 if none is needed.
    """

    decides_length: bool = False
    costly: bool = False
    prunes: bool = False
    prices: Prices = Prices()
    known: DraftTree = DraftTree.empty()
    observed_top_k: int = 0
    prompt_fraction: float = 0.0
    sampling: Sampling | None = None
    stats: SpeculationStats
    calibration: Calibration
    row_calibration: Calibration
    _in_use: threading.Lock
    # The prompt and the vocabulary's size of a call that could not begin yet.
    _awaited: tuple[np.ndarray, int] | None = None
    # What `a | b` is: `Blend`, which stands on this file and puts itself here.
    _blended: ClassVar[Any]
    # Types of arguments that are printed.
    _shown: ClassVar[tuple[type, ...]] = (bool, int, float, str)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Not in __init__: a subclass may forget to call it, and copies and pickles do not call it.
        drafter = super().__new__(cls)
        drafter.stats = SpeculationStats()
        drafter.calibration = Calibration(PRIOR_EXPONENT)
        drafter.row_calibration = Calibration()
        drafter._in_use = threading.Lock()
        return drafter

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuses a target model before a call does any work.

        Args:
            vocab_size (`int`): The target model's.

        Raises:
            ValueError: if what it drafts from holds ids outside of the vocabulary.
        """

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        """Starts a call. Where the kernels were not loaded yet, it comes after the first token, or
        in the middle of the call, and `observe` then receives what was emitted before.

        Args:
            prompt_ids (`np.ndarray`, int64 of shape `(n,)`): The prompt.
            vocab_size (`int`): The target model's; drafts must stay below it.

        Raises:
            ValueError: if what it drafts from holds ids outside of the vocabulary.
        """

    def draft(self, budget: int) -> DraftTree:
        """Drafts what may follow the prompt and all observed tokens, at most `budget` nodes."""
        raise NotImplementedError(f"{type(self).__name__} must implement draft(budget)")

    def draft_chain(self, budget: int) -> DraftTree:
        """Drafts a single path of at most `budget` nodes, for where trees cannot be verified.

        Override it where a chain that is grown as one is better than a tree's best path.
        """
        tree = self.draft(budget)
        if not isinstance(tree, DraftTree):
            raise _refused(self, budget, tree)
        # Checked before anything follows its parents.
        return tree.checked(ANY_VOCABULARY).best_chain()

    def continue_path(self, path: np.ndarray, budget: int) -> DraftTree:
        """Drafts what may follow the text and a path that another source has drafted, at most
        `budget` nodes. Called between `draft` and `observe`; by default nothing follows.

        Args:
            path (`np.ndarray`, int64 of shape `(n,)`): The tokens of the path.
        """
        return DraftTree.empty()

    def prune(self, tree: DraftTree, path: np.ndarray = NO_PATH) -> DraftTree:
        """Another source's tree without the nodes that cannot follow the text and a path. Called
        between `draft` and `observe` where it `prunes`; by default nothing is taken away.

        Args:
            tree ([`DraftTree`]): What the other source has drafted behind the path.
            path (`np.ndarray`, int64 of shape `(n,)`, *optional*): The tokens of the path.
        """
        return tree

    def observe(self, observation: Observation) -> None:
        """Receives what a forward pass of the target model yielded.

        Args:
            observation ([`Observation`]): The emitted tokens, the verified tree and what the target
                expected at each of its nodes; or, where `prompt_fraction` is above 0, what it
                expected inside the prompt.
        """

    def fork(self) -> Drafter:
        """Returns a drafter for another row of the same call, before `begin`.

        By default a deep copy. Override it to share what is large, or what all rows should add to.
        What became of any row's drafts corrects the estimates of all: forks share `calibration`.
        """
        fork = copy.deepcopy(self)
        fork.calibration = self.calibration
        return fork

    def end(self) -> None:
        """Ends the call, also after an exception (one from `begin` too)."""

    def __or__(self, other: Any) -> Drafter:
        """`a | b` drafts from both, see [`Blend`]; one of them may be a datastore."""
        return self._blended([self, other])

    def __ror__(self, other: Any) -> Drafter:
        return self._blended([other, self])

    def __repr__(self) -> str:
        """The arguments that differ from their defaults, but no large ones."""
        arguments = inspect.signature(type(self).__init__).parameters.values()
        given = [
            f"{each.name}={getattr(self, each.name)!r}"
            for each in arguments
            if isinstance(getattr(self, each.name, None), self._shown)
            and getattr(self, each.name) != each.default
        ]
        return f"{type(self).__name__}({', '.join(given)})"

    def __getstate__(self) -> dict[str, Any]:
        left_out = {"_in_use", "row_calibration"}
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    @contextmanager
    def session(
        self, prompt_ids: np.ndarray, vocab_size: int, sampling: Sampling | None = None
    ) -> Iterator[None]:
        """One call with a single row, see [`~Drafter.sessions`]."""
        with self.sessions([prompt_ids], vocab_size, sampling):
            yield

    @contextmanager
    def sessions(
        self, prompts: Sequence[np.ndarray], vocab_size: int, sampling: Sampling | None = None
    ) -> Iterator[list[Drafter]]:
        """One call, from `begin` to `end`, with fresh `stats`: this drafter drafts for the first
        row, a fork for each other.

        Args:
            prompts (sequence of `np.ndarray`): The prompt of each row, as `begin` takes it.
            vocab_size (`int`): The target model's.
            sampling ([`Sampling`], *optional*): How the call samples; `None` if it is greedy.

        Raises:
            RuntimeError: if another call is using this drafter.
        """
        with self._owned(), ExitStack() as rows:
            drafters = [self, *(self.fork() for _ in prompts[1:])]
            for drafter, prompt_ids in zip(drafters, prompts, strict=True):
                drafter.sampling = sampling
                rows.enter_context(drafter._call(prompt_ids, vocab_size))
            yield drafters
            for fork in drafters[1:]:
                self.stats += SpeculationStats(sources=fork.stats.sources)

    @contextmanager
    def _call(self, prompt_ids: np.ndarray, vocab_size: int) -> Iterator[None]:
        self._assisted_ids = None
        self.stats = SpeculationStats()
        self.row_calibration = Calibration()
        self.check_vocabulary(vocab_size)
        self._awaited = prompt_ids, vocab_size
        try:
            if drafting_kernels.loaded:
                self.begin_late()
            yield
        finally:
            if not self.awaiting_kernels:
                self.end()
            self._awaited = None

    @property
    def awaiting_kernels(self) -> bool:
        """Whether the call is still waiting to begin: it decodes plainly until the kernels are
        compiled."""
        return self._awaited is not None

    def begin_late(self, emitted: Sequence[int] = ()) -> None:
        """Begins the call that waits, if the kernels are ready by now, and observes what was
        `emitted` so far."""
        if self._awaited is None or not drafting_kernels.ready():
            return
        (prompt_ids, vocab_size), self._awaited = self._awaited, None
        self.begin(prompt_ids, vocab_size)
        if emitted:
            self.observe(Observation(np.array(emitted, dtype=np.int64)))

    @contextmanager
    def _owned(self) -> Iterator[None]:
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError(
                f"this {type(self).__name__} is in use by another call; make one drafter per "
                "thread, or fork() it"
            )
        try:
            yield
        finally:
            self._in_use.release()


def valid_draft(drafter: Drafter, budget: int, vocab_size: int, chain: bool) -> DraftTree:
    """Asks a drafter for a tree or a chain; raises a ValueError if it is no valid one."""
    draft = drafter.draft_chain(budget) if chain else drafter.draft(budget)
    if not isinstance(draft, DraftTree):
        raise _refused(drafter, budget, draft)
    return draft.checked(vocab_size)


def checked_draft(drafter: Drafter, budget: int, vocab_size: int, chain: bool) -> DraftTree:
    """A [`valid_draft`]; raises a ValueError if it has more than `budget` nodes."""
    draft = valid_draft(drafter, budget, vocab_size, chain)
    if len(draft) > budget:
        raise _refused(drafter, budget, len(draft))
    return draft


def _refused(drafter: Drafter, budget: int, drafted: Any) -> ValueError:
    return ValueError(
        f"{type(drafter).__name__} was asked for a DraftTree of at most {budget} nodes, but "
        f"drafted {drafted!r}."
    )


def last_tokens(before: np.ndarray, tokens: np.ndarray, count: int) -> np.ndarray:
    """The last tokens, up to `count`, of a text that continues, as int32."""
    return np.concatenate((before, tokens[-count:]), dtype=np.int32)[-count:]
