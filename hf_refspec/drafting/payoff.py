"""Drafters that run a model, and the costs and gains of its passes, by which further ones pay."""

from __future__ import annotations

import copy
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from .calibration import Calibration, Outcomes
from .contract import Call, Observation, PathDrafter, Speed
from .tree import ROOT, DraftTree

if TYPE_CHECKING:
    from typing_extensions import Self

# A pass costs the median of this number of passes, each over at most `_FEW_TOKENS` new tokens.
_PASSES = 15
_FEW_TOKENS = 4
# The priors of how often the next token is among the assistant's, and is its best one, and their
# weight. Outcomes fade by `_MEMORY` with each pass of the target, so that the assistant is tried
# again.
_ACCEPTED = 0.8
_BEST_ACCEPTED = 0.6
_PSEUDO_COUNT = 2.0
_MEMORY = 0.98
# The number of passes that are planned ahead, for the first alone may not pay where a pass over two
# tokens takes much longer than over one; and of the siblings that each adds to its best.
_AHEAD = 4
_SIBLINGS = 3
# Where the call names the number of nodes, a draft takes another pass only if the best tokens of
# the passes before it are accepted together this often: otherwise an assistant that is sure and
# wrong would run as often as there are nodes, one pass after another, for each row.
_LEAST_CHANCE = 0.05
# The part of the time that an assistant that does not pay may take to find out where it does.
_ALLOWANCE = 0.02


class Payoff(Outcomes):
    """The costs and gains of an assistant's passes so far, over all texts.

    A pass pays if the call's budget expects more tokens per second with it than without. Whatever
    is expected, the assistant runs only while it has saved at least as much time as it took, the
    prompt of the present text not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pass_seconds: deque[float] = deque(maxlen=_PASSES)
        self._asked = _PSEUDO_COUNT
        self._accepted = _ACCEPTED * _PSEUDO_COUNT
        self._best_accepted = _BEST_ACCEPTED * _PSEUDO_COUNT
        self._balance = 0.0  # seconds saved, less those taken
        self._draft_seconds = 0.0  # of the present draft
        self._prompt_seconds = 0.0  # of reading the present prompt

    def pays(
        self,
        speed: Speed | None,
        probs: np.ndarray,
        chance: float | np.ndarray,
        passes: int = 0,
        depth: int | None = None,
    ) -> bool:
        """True if the assistant should run once more.

        Args:
            speed (callable, *optional*): See [`Call`].
            probs (`np.ndarray`, float32 of shape `(n,)`): The estimates of all nodes so far.
            chance (`float`): The chance that its path is accepted and that no other source has
                drafted what follows; with a `depth` at each of these places, `(depth,)`.
            passes (`int`): The number of its passes for this draft.
            depth (`int`, *optional*): The tokens that one pass drafts, and a draft has no other
                pass; by default each of several passes drafts one.
        """
        best = self._best_accepted / self._asked
        if speed is None:
            return bool(np.any(chance > 0)) and best**passes > _LEAST_CHANCE
        if self._balance < 0:
            return False
        seconds = median(self._pass_seconds) if self._pass_seconds else 0.0
        sibling = (self._accepted / self._asked - best) / _SIBLINGS
        present = speed(probs, self._draft_seconds)
        places = [depth] if depth is not None else range(1, 1 + _AHEAD)
        for count in places:
            taken = seconds if depth is not None else count * seconds
            level = chance * best ** np.arange(count)
            further = np.outer(level, [best] + [sibling] * _SIBLINGS).ravel()
            if speed(np.concatenate((probs, further)), self._draft_seconds + taken) > present:
                return True
        return False

    def record_pass(self, tokens: int, seconds: float, of_prompt: bool) -> None:
        """Counts a pass over `tokens` new tokens, where the call has a `speed`."""
        if tokens <= _FEW_TOKENS:
            self._pass_seconds.append(seconds)
        if of_prompt:
            self._prompt_seconds += seconds
        else:
            self._draft_seconds += seconds

    def record_outcome(
        self, speed: Speed | None, asked: int, accepted: int, best: int, emitted: int
    ) -> None:
        """Counts the outcome of a draft.

        Args:
            speed (callable, *optional*): See [`Call`].
            asked (`int`): The number of places where the assistant drafted and no other source was
                right.
            accepted (`int`): The number of such places where one of its tokens was accepted.
            best (`int`): The number of such places where its best token was accepted.
            emitted (`int`): The number of tokens that the target's pass yielded.
        """
        self._asked = _faded(self._asked, 1.0) + asked
        self._accepted = _faded(self._accepted, _ACCEPTED) + accepted
        self._best_accepted = _faded(self._best_accepted, _BEST_ACCEPTED) + best
        if speed is not None:
            plain = speed(np.empty(0, dtype=np.float32), 0.0)
            self._balance += (accepted + _ALLOWANCE * emitted) / plain - self._draft_seconds
            self._draft_seconds = 0.0

    def end_text(self) -> None:
        """Counts the time of reading the prompt."""
        self._balance -= self._prompt_seconds + self._draft_seconds
        self._prompt_seconds = self._draft_seconds = 0.0


def outcome(known: DraftTree, tree: DraftTree, tokens: np.ndarray) -> tuple[int, int, int]:
    """The number of places where an assistant drafted and no other source was right; the number of
    such places where one of its tokens was accepted; and where its best token was. The others
    drafted `known`, it drafted `tree`, and the `tokens` int64 `(n,)` were emitted."""
    right = len(known.along(tokens.tolist()))
    nodes = [ROOT, *tree.along(tokens.tolist())]
    asked = np.isin(nodes[right : len(tokens)], tree.parents)
    accepted = nodes[1 + right : len(tokens)]  # the last token is the target's own
    _, best = np.unique(tree.parents, return_index=True)  # the first of siblings
    return int(asked.sum()), len(accepted), int(np.isin(accepted, best).sum())


class ModelDrafts(PathDrafter):
    """Drafts by passes of a model, while they pay. In a blend it drafts last, and knows what the
    others have drafted."""

    costly = True
    # The text so far. For `observe`: the last draft's `Call.known` and `Call.speed`, and all that
    # the model has drafted, verified or not.
    _ids: np.ndarray
    _known: DraftTree
    _speed: Speed | None
    _tree: DraftTree
    _of_a_call = (*PathDrafter._of_a_call, "_ids", "_known", "_speed", "_tree", "_vocab_size")

    def __init__(self) -> None:
        self.calibration = Calibration()  # without a prior: a model's estimates are sound
        self._payoff = Payoff()
        self._forget_call()

    def shared(self) -> list[Any]:
        """Models, modules and large arrays that copies have in common."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo |= {id(shared): shared for shared in self.shared()}
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_call()

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._forget_call()
        self._ids = prompt_ids
        self._vocab_size = vocab_size

    def observe(self, observation: Observation) -> None:
        tokens = observation.tokens
        asked, accepted, best = outcome(self._known, self._tree, tokens)
        self._payoff.record_outcome(self._speed, asked, accepted, best, emitted=len(tokens))
        self._ids = np.concatenate((self._ids, tokens))
        self._tree = DraftTree.empty()

    def end(self) -> None:
        self._payoff.end_text()
        self._forget_call()

    def _forget_call(self) -> None:
        self._ids = np.empty(0, dtype=np.int64)
        self._speed = None
        self._tree = self._known = DraftTree.empty()

    def _cut(self, budget: int, call: Call, path: list[int], probs: np.ndarray) -> DraftTree:
        """The nodes of a path, if the call verifies one, else the best ones by these `probs`."""
        tree = self._tree
        if call.chain:
            return DraftTree.chain(tree.tokens[path], tree.probs[path])
        best = np.argsort(-probs, kind="stable")[:budget]  # parents come first
        return tree.part(np.isin(np.arange(len(tree)), best))


def _faded(count: float, prior: float) -> float:
    return _MEMORY * count + (1 - _MEMORY) * prior * _PSEUDO_COUNT
