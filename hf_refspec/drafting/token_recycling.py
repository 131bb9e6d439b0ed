"""Drafts from the target's own logits: Token Recycling, and contexts of several tokens."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import numpy as np
import torch

from ..index.next_tokens import NextTokens
from ..index.recycling import MOST_CONTEXT
from .drafter import Drafter, check_count
from .token_ids import last_tokens
from .tree import ROOT, DraftTree

Mode: TypeAlias = Literal["contexts", "published"]

# A row for each length of the longest known context, 0 to 3: the exponents of contexts of 1, 2 and
# 3 tokens, of frequencies and of the last position, see `index.recycling_tree`. Fitted to 3,400
# next tokens of SmolLM2-135M-Instruct, greedy.
_EXPONENTS = np.array(
    [
        [0.0, 0.0, 0.0, 0.6, 0.2],
        [0.9, 0.0, 0.0, 0.35, 0.3],
        [0.6, 0.85, 0.0, 0.2, 0.3],
        [0.45, 0.35, 0.8, 0.25, 0.35],
    ]
)
_MISSES = np.exp([4.2, 4.3, 4.3, 3.9])
# What the paper has: k, and contexts of one token.
_PUBLISHED = {"top_k": 8, "context": 1}


class TokenRecycling(Drafter):
    """Drafts what the target itself expected after the same last tokens, earlier on.

    Each forward pass tells the k best next tokens after every verified node, accepted or not. They
    are kept for the last 1 to n tokens, from call to call, and drafts grow out of them: it needs no
    text that repeats. See [`~index.recycling_tree.recycling_tree`].

    It can be shared by threads through `fork()`, which learns into the same table. A copy (or
    pickle) has a table of its own.

    Args:
        top_k (`int`, *optional*, defaults to 8): k, the next tokens that are kept of a context.
        context (`int`, *optional*, defaults to 3): n, the longest contexts, from 1 to 3 tokens.
        max_contexts (`int`, *optional*, defaults to 262,144): The most contexts that are kept; then
            those that were not verified for longest are given up. Each takes 8 k + 28 to 8 k + 36
            bytes once it is there: 26 MB at most by default.
        mode (`"contexts"` or `"published"`, *optional*, defaults to `"contexts"`): `"published"` is
            the algorithm of "Turning Trash into Treasure: Accelerating Inference of Large Language
            Models with Token Recycling" (arXiv 2408.08696, section 3): one matrix of the 8 best
            next tokens of each token, and breadth first the static tree of 80 nodes that the
            authors published (the first of them, where the budget is smaller). Where a token has
            not been seen yet nothing is drafted; the paper drafts token 0 there. `top_k` and
            `context` are then 8 and 1.

    Raises:
        TypeError: if a number is no int.
        ValueError: if a number is less than 1, `context` more than 3, or there is no such `mode`.
            `begin` raises it if `top_k` is larger than the target's vocabulary.
    """

    def __init__(
        self,
        top_k: int = 8,
        context: int = 3,
        max_contexts: int = 1 << 18,
        mode: Mode = "contexts",
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {get_args(Mode)}, but is {mode!r}")
        check_count("top_k", top_k)
        check_count("context", context)
        check_count("max_contexts", max_contexts)
        if context > MOST_CONTEXT:
            raise ValueError(f"context must be at most {MOST_CONTEXT} tokens, but is {context}")
        if mode == "published":
            top_k, context = _PUBLISHED["top_k"], _PUBLISHED["context"]
        self.mode = mode
        self._table = NextTokens(top_k, context, max_contexts)
        self._forget_call()

    @property
    def top_k(self) -> int:
        """How many of the target's best next tokens it wants to be told."""
        return self._table.top_k

    @property
    def context(self) -> int:
        """The longest contexts."""
        return self._table.context

    @property
    def max_contexts(self) -> int:
        """The most contexts that are kept."""
        return self._table.max_contexts

    def __len__(self) -> int:
        """How many contexts there are now."""
        return len(self._table)

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        if self.top_k > vocab_size:
            raise ValueError(
                f"top_k is {self.top_k}, but the target model's vocabulary has only {vocab_size} "
                "tokens"
            )
        self._forget_call()
        self._table.begin(vocab_size)
        self._prompt = prompt_ids
        self._text = last_tokens(self._text, prompt_ids, MOST_CONTEXT)

    def draft(self, budget: int) -> DraftTree:
        return self._draft(budget, chain=False)

    def draft_chain(self, budget: int) -> DraftTree:
        return self._draft(budget, chain=True)

    def observe_prompt(self, token_ids: np.ndarray, probs: np.ndarray) -> None:
        """Is told what the target expected after the prompt's last positions but the very last.

        Args:
            token_ids (`np.ndarray`, int32 of shape `(m, k)`): The best next tokens, best first.
            probs (`np.ndarray`, float32 of shape `(m, k)`): Their probabilities.
        """
        if self.mode == "published" or len(token_ids) == 0:
            return
        first = len(self._prompt) - len(token_ids)  # what follows the first position told
        before = last_tokens(self._prompt[:0], self._prompt[:first], MOST_CONTEXT)
        chain = DraftTree.chain(self._prompt[first:-1])
        self._table.learn(before, chain.tokens, chain.parents, token_ids, probs)

    def observe_top_k(self, verified: DraftTree, token_ids: np.ndarray, probs: np.ndarray) -> None:
        """Is told what the target expected after the text so far and after each verified node.

        Args:
            verified ([`DraftTree`]): The tree of the forward pass, T nodes.
            token_ids (`np.ndarray`, int32 of shape `(1 + T, k)`): The best next tokens, best first.
            probs (`np.ndarray`, float32 of shape `(1 + T, k)`): Their probabilities.
        """
        token_ids, probs = np.ascontiguousarray(token_ids), np.ascontiguousarray(probs)
        self._table.learn(self._text, verified.tokens, verified.parents, token_ids, probs)
        self._expected = token_ids, probs

    def observe(
        self,
        tokens: np.ndarray,
        verified: DraftTree | None = None,
        logits: torch.Tensor | None = None,
    ) -> None:
        if logits is not None and verified is not None and self._expected is None:
            self.observe_top_k(verified, *best_next(logits, self.top_k))
        self._text = last_tokens(self._text, tokens, MOST_CONTEXT)
        self._table.count(tokens)
        self._runners_up = self._instead_of_last(tokens, verified)
        self._expected = None

    def fork(self) -> TokenRecycling:
        fork = type(self).__new__(type(self))
        fork.__dict__ |= {"mode": self.mode, "_table": self._table}
        fork._forget_call()
        return fork

    def _draft(self, budget: int, chain: bool) -> DraftTree:
        if budget == 0 or len(self._text) == 0:
            return DraftTree.empty()
        if self.mode == "published":
            tree = DraftTree(*self._table.static_tree(int(self._text[-1]), budget))
            return tree.best_chain() if chain else tree
        return DraftTree(
            *self._table.tree(
                self._text, *self._runners_up, _EXPONENTS, _MISSES, budget, chain
            )
        )

    def _instead_of_last(
        self, tokens: np.ndarray, verified: DraftTree | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """What the target expected in place of the last token."""
        if self._expected is None or verified is None:
            return _NOTHING
        node, children = ROOT, verified.children()
        for token in tokens[:-1].tolist():
            node = children[node, token]
        token_ids, probs = self._expected
        return token_ids[1 + node], probs[1 + node]

    def _forget_call(self) -> None:
        self._prompt = np.empty(0, dtype=np.int64)
        self._text = np.empty(0, dtype=np.int32)
        self._expected: tuple[np.ndarray, np.ndarray] | None = None
        self._runners_up = _NOTHING


_NOTHING = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)


def best_next(logits: torch.Tensor, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The best next tokens by some logits, and their probabilities.

    Args:
        logits (`torch.Tensor` of shape `(n, vocab_size)`): Raw, on any device.
        top_k (`int`): How many.

    Returns:
        On the host, int32 and float32, both of shape `(n, top_k)`, best first.
    """
    best, tokens = logits.topk(top_k, dim=-1)
    probs = (best.float() - logits.float().logsumexp(dim=-1, keepdim=True)).exp()
    return tokens.to(torch.int32).numpy(force=True), probs.numpy(force=True)
