"""The base class of everything that drafts."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from transformers.generation.candidate_generator import CandidateGenerator

from .calibration import PRIOR_EXPONENT, Calibration
from .observation import Observation
from .sampling import Sampling
from .stats import SpeculationStats
from .tree import DraftTree

# transformers' protocol names no vocabulary; this one holds every id that an int32 can.
_ANY_VOCABULARY = 2**31 - 1


class Drafter(CandidateGenerator):
    """Drafts the tokens that may come next, for the target model to verify.

    One call of `generate` is `begin -> (draft -> observe)* -> end`, and a subclass implements
    `draft` and what it needs of the others. A drafter serves one call at a time; make one per
    thread. In a call with several rows each row has a `fork` of its own. It can be pickled and
    copied between calls.

    Attributes:
        stats (`SpeculationStats`): Of the last call.
        assisted_draft_tokens (`int`): The longest draft inside transformers' own assisted
            decoding, which sets no budget (10, as its prompt look-up has).
        decides_length (`bool`): Whether a draft is verified as it is where the call names no
            number of draft nodes; otherwise only what pays is.
        calibration ([`Calibration`]): What became of its estimates so far.
        sampling ([`Sampling`], *optional*): How the call samples, known when it begins; `None` if
            it is greedy.
        observed_top_k (`int`): How many of the target's best next tokens at each verified node
            it needs; 0 if none.
        prompt_fraction (`float`): What an observation of the prompt may cost at most, as a
            fraction of the prefill; 0 if none is needed.
    """

    assisted_draft_tokens: int = 10
    decides_length: bool = False
    sampling: Sampling | None = None
    observed_top_k: int = 0
    prompt_fraction: float = 0.0
    stats: SpeculationStats
    calibration: Calibration
    _shown: ClassVar[tuple[type, ...]] = (bool, int, float, str)  # types of arguments, by repr()
    # What `a | b` is: `Blend`, which stands on this file and puts itself here.
    _blended: ClassVar[Any]
    _in_use: threading.Lock
    _seen_ids: np.ndarray

    def __new__(cls, *args: Any, **kwargs: Any) -> Drafter:
        # Not in __init__: a subclass may forget to call it, and copies and pickles do not call it.
        drafter = super().__new__(cls)
        drafter.stats = SpeculationStats()
        drafter.calibration = Calibration(PRIOR_EXPONENT)
        drafter._in_use = threading.Lock()
        drafter._seen_ids = np.empty(0, dtype=np.int64)
        return drafter

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        """Starts a call.

        Args:
            prompt_ids (`np.ndarray`, int64 of shape `(n,)`): The prompt.
            vocab_size (`int`): The target model's; drafts must stay below it.

        Raises:
            ValueError: if what it drafts from holds ids outside of the vocabulary.
        """

    def draft(self, budget: int) -> DraftTree:
        """Drafts what may follow all that it has been told, at most `budget` nodes."""
        raise NotImplementedError(f"{type(self).__name__} must implement draft(budget)")

    def draft_chain(self, budget: int) -> DraftTree:
        """Drafts a single path of at most `budget` nodes, for where trees cannot be verified.

        Override it where a chain that is grown as one is better than a tree's best path.
        """
        # Checked before anything follows its parents.
        return self.draft(budget).checked(_ANY_VOCABULARY).best_chain()

    def observe(self, observation: Observation) -> None:
        """Receives what a forward pass of the target model yielded.

        Args:
            observation ([`Observation`]): The emitted tokens, the verified tree and what the target
                expected at each of its nodes; or, where `prompt_fraction` is above 0, what it
                expected inside the prompt.
        """

    def __or__(self, other: Any) -> Drafter:
        """`a | b` drafts from both, see [`Blend`]; one of them may be a datastore."""
        return self._blended([self, other])

    def __ror__(self, other: Any) -> Drafter:
        return self._blended([other, self])

    def __repr__(self) -> str:
        """As it could have been made; arguments that are large or defaults are left out."""
        arguments = inspect.signature(type(self).__init__).parameters.values()
        given = [
            f"{each.name}={getattr(self, each.name)!r}"
            for each in arguments
            if isinstance(getattr(self, each.name, None), self._shown)
            and getattr(self, each.name) != each.default
        ]
        return f"{type(self).__name__}({', '.join(given)})"

    def end(self) -> None:
        """The call is over, also by an exception (one from `begin` too)."""

    @contextmanager
    def session(
        self, prompt_ids: np.ndarray, vocab_size: int, sampling: Sampling | None = None
    ) -> Iterator[None]:
        """One call with a single row, see [`~Drafter.sessions`]."""
        with self.sessions([prompt_ids], vocab_size, sampling):
            yield

    @contextmanager
    def sessions(
        self,
        prompts: Sequence[np.ndarray],
        vocab_size: int,
        sampling: Sampling | None = None,
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
                rows.enter_context(drafter._begun(prompt_ids, vocab_size))
            yield drafters

    def fork(self) -> Drafter:
        """A drafter of its own for another row of the same call, asked for before `begin`.

        By default a deep copy. Override it where something large, or something that all rows should
        add to, is better shared.
        """
        return copy.deepcopy(self)

    @contextmanager
    def _begun(self, prompt_ids: np.ndarray, vocab_size: int) -> Iterator[None]:
        self.stats = SpeculationStats()
        self._seen_ids = np.empty(0, dtype=np.int64)
        try:
            self.begin(prompt_ids, vocab_size)
            yield
        finally:
            self.end()

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

    def get_candidates(
        self, input_ids: torch.LongTensor, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """transformers' protocol: `input_ids` with a chain of draft tokens behind them.

        Ids that go on from those of the last call are the same text, others begin a new one.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, n)`): Prompt and output so far.

        Returns:
            The candidate ids, of shape `(1, n + m)`, and `None`: there are no draft logits.

        Raises:
            ValueError: if there is more than one row.
            RuntimeError: if another call is using this drafter.
        """
        if input_ids.shape[0] != 1:
            raise ValueError(f"input_ids must have one row, but has {input_ids.shape[0]}")
        with self._owned():
            self._follow(input_ids[0].numpy(force=True).copy())
            chain = self.draft_chain(self.assisted_draft_tokens)
        draft_ids = torch.from_numpy(chain.tokens).to(input_ids.device)
        return torch.cat((input_ids, draft_ids[None]), dim=1), None

    def _follow(self, ids: np.ndarray) -> None:
        """Observes what is new in `ids`, or begins where they are another text."""
        seen = len(self._seen_ids)
        if seen and np.array_equal(ids[:seen], self._seen_ids):
            if len(ids) > seen:
                self.observe(Observation(ids[seen:]))
        else:
            if seen:
                self.end()
            self.begin(ids, _ANY_VOCABULARY)
        self._seen_ids = ids

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int
    ) -> None:
        """transformers' protocol: nothing to do, `get_candidates` sees what was accepted."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_in_use"}


def checked_draft(drafter: Drafter, budget: int, vocab_size: int, chain: bool) -> DraftTree:
    """What `drafter` drafts, a tree or a chain.

    Raises:
        ValueError: If it is no tree of at most `budget` nodes, or a bad one.
    """
    draft = drafter.draft_chain(budget) if chain else drafter.draft(budget)
    if not isinstance(draft, DraftTree) or len(draft) > budget:
        raise ValueError(
            f"{type(drafter).__name__} was asked for a DraftTree of at most {budget} nodes, but "
            f"drafted {len(draft) if isinstance(draft, DraftTree) else draft!r}."
        )
    return draft.checked(vocab_size)
