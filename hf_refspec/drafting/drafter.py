"""The base class of everything that drafts: begin, draft, observe, fork, end."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import numpy as np

from .assisted import ANY_VOCABULARY, AssistedDrafter
from .calibration import PRIOR_EXPONENT, Calibration
from .observation import Observation
from .printed import Printed
from .stats import SpeculationStats
from .tree import DraftTree


class Drafter(Printed, AssistedDrafter):
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
        calibration ([`Calibration`]): The outcomes of its estimates so far.
        sampling ([`Sampling`], *optional*): How the call samples, known when it begins; `None` if
            it is greedy.
        observed_top_k (`int`): How many of the target's best next tokens at each verified node it
            needs; 0 if none.
        prompt_fraction (`float`): What an observation of the prompt may cost at most, as a
            fraction of the prefill; 0 if none is needed.
    """

    decides_length: bool = False
    observed_top_k: int = 0
    prompt_fraction: float = 0.0
    calibration: Calibration
    # What `a | b` is: `Blend`, which stands on this file and puts itself here.
    _blended: ClassVar[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Drafter:
        drafter = super().__new__(cls)
        drafter.stats = SpeculationStats()
        drafter.calibration = Calibration(PRIOR_EXPONENT)
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
        """Drafts what may follow the prompt and all observed tokens, at most `budget` nodes."""
        raise NotImplementedError(f"{type(self).__name__} must implement draft(budget)")

    def draft_chain(self, budget: int) -> DraftTree:
        """Drafts a single path of at most `budget` nodes, for where trees cannot be verified.

        Override it where a chain that is grown as one is better than a tree's best path.
        """
        # Checked before anything follows its parents.
        return self.draft(budget).checked(ANY_VOCABULARY).best_chain()

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
        """
        return copy.deepcopy(self)

    def end(self) -> None:
        """Ends the call, also after an exception (one from `begin` too)."""

    def __or__(self, other: Any) -> Drafter:
        """`a | b` drafts from both, see [`Blend`]; one of them may be a datastore."""
        return self._blended([self, other])

    def __ror__(self, other: Any) -> Drafter:
        return self._blended([other, self])


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
