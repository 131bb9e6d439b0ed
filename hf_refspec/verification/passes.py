"""A pass: the tokens of R rows in one forward pass of the target model, and what the model returns.

row 0   p p p p x x | r d d d        p  prompt, x  output, both cached
row 1   p p x x x x | x r            x, r  pending: not yet cached; r  the root, the last token
row 2   p p p | r d                  d  draft nodes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from ..drafting.tree import DraftTree

# Arrays of one copy begin at multiples of this number of bytes, as compiled kernels expect.
_ALIGNMENT = 64


class TokenSequence(Protocol):
    """The part of a row that a verifier needs."""

    @property
    def ids(self) -> torch.Tensor:
        """All tokens, including padding, int64 of shape `(1, length)`."""

    def tail(self, count: int) -> np.ndarray:
        """The last `count` tokens on the host, int64 of shape `(count,)`."""

    def __len__(self) -> int: ...


class FixedTokens:
    """Tokens `(1, length)` that do not grow."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def tail(self, count: int) -> np.ndarray:
        return self.ids[0, len(self) - count :].numpy(force=True).astype(np.int64)

    def __len__(self) -> int:
        return self.ids.shape[1]


class AllButLast:
    """A row without its last token."""

    def __init__(self, row: TokenSequence) -> None:
        self._row = row

    @property
    def ids(self) -> torch.Tensor:
        return self._row.ids[:, :-1]

    def tail(self, count: int) -> np.ndarray:
        return self._row.tail(count + 1)[:-1]

    def __len__(self) -> int:
        return len(self._row) - 1


@dataclass(frozen=True)
class Pass:
    """The tokens of R rows in one forward pass: of each row its pending tokens, then the nodes of
    its draft.

    Attributes:
        rows (`Sequence[TokenSequence]`): The texts.
        drafts (`Sequence[DraftTree]`): A draft for each.
        cached (`list[int]`): How many tokens of each row the cache holds.
        records (`bool`): Whether the inputs of the output layer are returned, see
            [`PassResult.states`].
        padded_size (`Callable`): The size to which a pass over this number of tokens of packed rows
            is padded.
    """

    rows: Sequence[TokenSequence]
    drafts: Sequence[DraftTree]
    cached: list[int]
    records: bool = False
    padded_size: Callable[[int], int] = int

    @cached_property
    def pending(self) -> list[int]:
        """How many tokens of each row come before its draft."""
        return [len(row) - cached for row, cached in zip(self.rows, self.cached, strict=True)]

    @cached_property
    def sizes(self) -> list[int]:
        """How many tokens each row has in the pass, S_i."""
        return [
            pending + len(draft) for pending, draft in zip(self.pending, self.drafts, strict=True)
        ]

    @property
    def size(self) -> int:
        """The most tokens that a row has in the pass, S."""
        return max(self.sizes)

    @property
    def is_step(self) -> bool:
        """Whether nothing runs but the last token of each row and its draft."""
        return max(self.pending) == 1

    @cached_property
    def tokens(self) -> list[np.ndarray]:
        """The ids of each row's tokens, int64 of shape `(S_i,)`."""
        return [
            np.concatenate((row.tail(pending), draft.tokens), dtype=np.int64)
            for row, draft, pending in zip(self.rows, self.drafts, self.pending, strict=True)
        ]

    @cached_property
    def indices(self) -> list[np.ndarray]:
        """The index in its row that each token has, or would have if it were accepted, int64 of
        shape `(S_i,)`."""
        return [
            np.concatenate(
                (np.arange(len(row) - pending, len(row)), len(row) - 1 + draft.depths()),
                dtype=np.int64,
            )
            for row, draft, pending in zip(self.rows, self.drafts, self.pending, strict=True)
        ]

    @cached_property
    def visible(self) -> list[np.ndarray]:
        """Which of each other the tokens of a row see, bool of shape `(S_i, S_i)`: pending tokens
        those before them, nodes all pending tokens and their ancestors (tree attention)."""
        masks = []
        for draft, pending, size in zip(self.drafts, self.pending, self.sizes, strict=True):
            mask = np.zeros((size, size), dtype=np.bool_)
            mask[:pending, :pending] = np.tri(pending, dtype=np.bool_)
            mask[pending:, :pending] = True
            mask[pending:, pending:] = draft.ancestors()
            masks.append(mask)
        return masks

    def kept(self, paths: Sequence[list[int] | None]) -> list[list[int]]:
        """The accepted tokens of each row, as indices in the pass."""
        return [
            [] if path is None else [*range(pending), *(pending + node for node in path)]
            for pending, path in zip(self.pending, paths, strict=True)
        ]

    def cached_after(self, paths: Sequence[list[int] | None]) -> list[int]:
        """How many tokens of each row the cache holds once those of these paths are kept."""
        return [
            cached if path is None else cached + pending + len(path)
            for cached, pending, path in zip(self.cached, self.pending, paths, strict=True)
        ]


@dataclass(frozen=True)
class PassResult:
    """What a forward pass returned.

    Attributes:
        logits (`torch.Tensor` of shape `(N, vocab_size)`): Those of all rows, from the first root
            on: pending tokens before it are left out.
        roots (`list[int]`): For each row the index of the logits after its last token; those after
            each node of its draft follow. Without meaning where a row has no token in the pass.
        pass_tokens (`int`): The tokens that ran, of all rows and with their padding.
        is_step (`bool`): Whether its time says what a step costs: nothing ran but the last token of
            each row and its draft, and nothing was compiled.
        prompts (`list[int]`): After a prefill, for each row the index of its prompt among those
            that ran: rows may share one.
        states (`list[torch.Tensor]`): Inputs of the output layer, `(R, n, hidden_size)`, if the
            pass records them.
    """

    logits: torch.Tensor
    roots: list[int]
    pass_tokens: int
    is_step: bool = False
    prompts: list[int] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)


def uploaded(arrays: Mapping[Any, np.ndarray], device: torch.device) -> dict[Any, torch.Tensor]:
    """These arrays on a device: one copy takes all of them there, and the host does not wait."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    starts = {}
    size = 0
    for name, array in arrays.items():
        starts[name] = size
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    # Pinned memory goes back to torch's pool, which uses it again once the copy is through.
    staged = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, start in starts.items():
        array = arrays[name]
        there = staged.numpy()[start : start + array.nbytes].view(array.dtype)
        there.reshape(array.shape)[...] = array
    on_device = staged.to(device, non_blocking=True)
    return {
        name: on_device[start : start + arrays[name].nbytes]
        .view(torch.from_numpy(arrays[name]).dtype)
        .view(arrays[name].shape)
        for name, start in starts.items()
    }
