"""The contract of a drafter: `begin`, then `draft` and `observe` for each pass, and `end`."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import torch
from transformers import GenerationConfig

from .calibration import PRIOR_EXPONENT, Calibration
from .stats import DraftStats
from .tree import DraftTree

if TYPE_CHECKING:
    from typing_extensions import Self

NO_PATH = np.empty(0, dtype=np.int64)

Speed: TypeAlias = Callable[[np.ndarray, float], float]
Noise: TypeAlias = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Sampling:
    """The options of a sampled call by which a drafter estimates its tokens. Other options, such
    as min-p, may shape the distribution as well; with all of them the text is plain sampling's.

    Attributes:
        temperature (`float`): The divisor of logits.
        top_k (`int`): The number of most probable tokens that may be drawn; 0 for all.
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


@dataclass(frozen=True)
class Call:
    """The options of a call of `generate` at one draft.

    Attributes:
        sampling ([`Sampling`], *optional*): How it samples; `None` if it is greedy.
        chain (`bool`): True if it verifies a single path: the best path of the draft. A drafter may
            do better by growing one path from the start.
        depth (`int`): The depth to which the draft can be verified.
        speed (callable, *optional*): Returns the expected tokens per second of the best pass over
            nodes with given estimates (`np.ndarray`, float32 of shape `(n,)`), drafted in given
            seconds; for a drafter that takes much time. `None` where the call names the number of
            nodes.
        noise (callable, *optional*): Returns the random numbers `(vocab_size,)` of a token after
            the text, counted from 0: a sampled call chooses the argmax of its probabilities divided
            by them.
        known ([`DraftTree`]): The drafts of the other sources of a [`Blend`], for one that is
            `costly`.
    """

    sampling: Sampling | None = None
    chain: bool = False
    depth: int = sys.maxsize
    speed: Speed | None = None
    noise: Noise | None = None
    known: DraftTree = field(default_factory=DraftTree.empty)


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """Hidden states of the target at accepted tokens that its last pass read: n tokens, up to the
    last one but one of the text.

    Attributes:
        hidden_states (`tuple[torch.Tensor | None, ...]`): The hidden states `(1, n, hidden_size)`,
            as the model returned them: `None` for layers that were not asked for.
        position (`int`): The position of the last of these tokens.
        shared_kv (`dict[str, tuple[torch.Tensor, ...]]`, *optional*): The keys and values
            `(1, heads, m, head_dim)` of all m tokens read so far, by the type of layer, where a
            model shares them (Gemma 4); valid until the next pass.
    """

    hidden_states: tuple[torch.Tensor | None, ...]
    position: int
    shared_kv: dict[str, tuple[torch.Tensor, ...]] | None = None

    def __len__(self) -> int:
        return next(states.shape[1] for states in self.hidden_states if states is not None)

    def last(self, count: int) -> States:
        """The states of the last tokens alone."""
        first = len(self) - count
        kept = (states if states is None else states[:, first:] for states in self.hidden_states)
        return replace(self, hidden_states=tuple(kept))

    @staticmethod
    def joined(parts: Sequence[States | None]) -> States | None:
        """The states of several passes in a row; `None` if one of them has returned none."""
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or not known:
            return None
        layers = zip(*(part.hidden_states for part in known), strict=True)
        joined = (None if layer[0] is None else torch.cat(layer, dim=1) for layer in layers)
        return replace(known[-1], hidden_states=tuple(joined))


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """The result of one forward pass of the target model for one row.

    Attributes:
        tokens (`np.ndarray`, int64 of shape `(n,)`): The emitted tokens: the accepted draft tokens
            and the one that the target chose after them.
        verified ([`DraftTree`]): The tree of the forward pass, T nodes: the draft, merged with
            other drafters' drafts and trimmed. Empty after the prefill.
        logits (`torch.Tensor` of shape `(1 + T, vocab_size)`, *optional*): The target's raw logits
            after the text so far and after each node of `verified`, accepted or not, on its device;
            valid until the next pass. `None` where drafts cannot be verified.
        top_tokens (`np.ndarray`, int32 of shape `(1 + T, k)`, *optional*): The best next tokens
            after the text so far and after each node, the best first; k is at least the drafter's
            `observed_top_k`, or the size of the vocabulary. `None` where no drafter of the call
            asked for any.
        top_probs (`np.ndarray`, float32 of the same shape, *optional*): Their probabilities, about
            the softmax of the raw logits.
        states ([`States`], *optional*): What `observed_outputs` asked for; `None` where the pass
            could not return it.
    """

    tokens: np.ndarray
    verified: DraftTree = field(default_factory=DraftTree.empty)
    logits: torch.Tensor | None = None
    top_tokens: np.ndarray | None = None
    top_probs: np.ndarray | None = None
    states: States | None = None


class Drafter:
    """Drafts the tokens that may come next, for the target model to verify.

    One call of `generate` is `begin -> (draft -> observe)* -> end`. A subclass implements `draft`,
    and what it needs of the others. A drafter serves one call at a time; make one per thread. In a
    call with several rows each row has a `fork` of its own. It can be pickled and copied: a copy
    keeps what it has learned, a pickle holds its arguments, and nothing of the calls that it has
    served. A [`Blend`] has further uses for a [`PathDrafter`].

    Attributes:
        stats (`DraftStats`): The statistics of the last call, which makes new ones as it begins.
        calibration ([`Calibration`]): The outcomes of its estimates so far: its own, shared by its
            forks. Calls whose budget chooses nodes record there what was accepted.
        decides_length (`bool`): True if a call without `max_draft_tokens` verifies its drafts as
            they are, and not only what pays.
        observed_top_k (`int`): The number of the target's best next tokens that it needs at each
            verified node; 0 if none.
        observed_outputs (`Mapping[str, Any]`): The arguments by which it asks the target's passes
            for hidden states, such as `{"output_hidden_states": True}`; none if it needs none.
    """

    stats: DraftStats
    calibration: Calibration
    decides_length: bool = False
    observed_top_k: int = 0
    observed_outputs: Mapping[str, Any] = MappingProxyType({})
    # Attributes that a call sets, and that no copy or pickle has. A subclass names its own as well.
    _of_a_call: tuple[str, ...] = ("_in_use", "_blends", "stats")
    # `a | b` drafts from both: `__init__.py` defines it, as a [`Blend`] is made of drafters.
    __or__: ClassVar[Callable[[Drafter, Any], Drafter]]
    __ror__: ClassVar[Callable[[Drafter, Any], Drafter]]

    def __new__(cls, *_: Any, **__: Any) -> Self:
        # Not in __init__: a subclass may forget to call it, and copies and pickles do not call it.
        self = super().__new__(cls)
        self.stats = DraftStats()
        self.calibration = Calibration(PRIOR_EXPONENT)
        return self

    @property
    def sources(self) -> Sequence[Drafter]:
        """The drafters that draft in its calls: itself, or the sources of a [`Blend`]."""
        return [self]

    def check(self, vocab_size: int, processors: Sequence[Any] | None = None) -> None:
        """Checks a call before any work starts. Raises a ValueError if it would draft ids outside
        of the target's vocabulary; `processors` are the call's logits processors, where known."""

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        """Starts a call. If the kernels are not ready yet, it comes after the first token or later
        in the call, and `observe` then receives the tokens emitted before.

        Args:
            prompt_ids (`np.ndarray`, int64 of shape `(n,)`): The prompt.
            vocab_size (`int`): The target model's; drafts must stay below it.
        """

    def draft(self, budget: int, call: Call) -> DraftTree:
        """Drafts what may follow the prompt and all observed tokens, at most `budget` nodes."""
        raise NotImplementedError(f"{type(self).__name__} must implement draft(budget, call)")

    def observe(self, observation: Observation) -> None:
        """Receives the result of a forward pass of the target model.

        Args:
            observation ([`Observation`]): The emitted tokens, the verified tree and what the target
                expected after each of its nodes.
        """

    def fork(self) -> Drafter:
        """Returns a drafter for another row of the same call, before `begin`.

        By default a deep copy that shares `calibration`, so that the outcomes of each row's drafts
        correct the estimates of all. Override it to share large data, or data that all rows add to.
        """
        return copy.deepcopy(self, {id(self.calibration): self.calibration})

    def source_texts(self) -> list[tuple[str, Sequence[Any]]]:
        """The texts that it copies from, for `stats.copied`: each source's name and its arrays,
        which no later call may change. Called before `end`; none by default."""
        return []

    def end(self) -> None:
        """Ends the call, also after an exception (one from `begin` too)."""

    def __repr__(self) -> str:
        """Its arguments that differ from the defaults: numbers and strings alone."""
        arguments = []
        for parameter in inspect.signature(type(self).__init__).parameters.values():
            value = getattr(self, parameter.name, parameter.default)
            if isinstance(value, (int, float, str)) and value != parameter.default:
                arguments.append(f"{parameter.name}={value!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"

    def __getstate__(self) -> dict[str, Any]:
        return {k: value for k, value in vars(self).items() if k not in self._of_a_call}


def checked_draft(drafter: Drafter, budget: int, call: Call, vocab_size: int) -> DraftTree:
    """A drafter's draft, as one path if the call needs that; a ValueError if it is not valid."""
    draft: Any = drafter.draft(budget, call)
    if not isinstance(draft, DraftTree) or len(draft) > budget:
        drafted = len(draft) if isinstance(draft, DraftTree) else repr(draft)
        raise ValueError(
            f"{type(drafter).__name__} was asked for a DraftTree of at most {budget} nodes, but "
            f"drafted {drafted}."
        )
    draft = draft.checked(vocab_size)
    return draft if not call.chain or draft.is_chain else draft.best_chain()


class PathDrafter(Drafter):
    """A drafter that can also draft what follows a path of tokens after the text.

    Attributes:
        costly (`bool`): True if it runs a model to draft, and so drafts after the others.
        prunes (`bool`): True if it knows what cannot follow, and so prunes and continues the
            others' trees.
    """

    costly: bool = False
    prunes: bool = False

    def draft(self, budget: int, call: Call) -> DraftTree:
        return self.continue_path(NO_PATH, budget, call)

    def continue_path(self, path: np.ndarray, budget: int, call: Call) -> DraftTree:
        """Drafts what may follow the text and a path that another source has drafted, at most
        `budget` nodes. Called between `draft` and `observe`; drafts nothing by default.

        Args:
            path (`np.ndarray`, int64 of shape `(n,)`): The tokens of the path.
            budget (`int`): As of `draft`.
            call ([`Call`]): As of `draft`.
        """
        return DraftTree.empty()

    def prune(self, tree: DraftTree, path: np.ndarray = NO_PATH) -> DraftTree:
        """Removes the nodes that cannot follow the text and a path from another source's tree.
        Called between `draft` and `observe` if it `prunes`; removes nothing by default.

        Args:
            tree ([`DraftTree`]): The other source's draft after the path.
            path (`np.ndarray`, int64 of shape `(n,)`, *optional*): The tokens of the path.
        """
        return tree


class LookUp(PathDrafter):
    """Drafts what has followed the last tokens elsewhere: a subclass implements `look_up`.

    Attributes:
        longest_match (`int`): The number of last tokens that are looked up.
    """

    longest_match: int
    _context = np.empty(0, dtype=np.int32)  # the last tokens of the text
    _of_a_call = (*PathDrafter._of_a_call, "_context")

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._context = prompt_ids[-self.longest_match :].astype(np.int32)

    def draft(self, budget: int, call: Call) -> DraftTree:
        if budget == 0 or len(self._context) == 0:
            return DraftTree.empty()
        return self.look_up(self._context, budget, False, call)

    def continue_path(self, path: np.ndarray, budget: int, call: Call) -> DraftTree:
        return self.look_up(self._followed_by(path), budget, True, call)

    def look_up(self, context: np.ndarray, budget: int, behind_path: bool, call: Call) -> DraftTree:
        """Drafts at most `budget` > 0 nodes that may follow `context`, int32 of shape `(n,)` with
        n > 0: the last tokens of the text, or of a path after it if `behind_path`."""
        raise NotImplementedError(f"{type(self).__name__} must implement look_up")

    def observe(self, observation: Observation) -> None:
        self._context = self._followed_by(observation.tokens)

    def _followed_by(self, tokens: np.ndarray) -> np.ndarray:
        joined = np.concatenate((self._context, tokens[-self.longest_match :]), dtype=np.int32)
        return joined[-self.longest_match :]
