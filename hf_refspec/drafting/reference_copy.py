"""Drafts by copying from reference texts, the prompt and the output (LLMA, and beyond it)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_refspec.drafting.drafter import Drafter
from hf_refspec.drafting.tree import DraftTree
from hf_refspec.index import kernels
from hf_refspec.index.token_buffer import TokenBuffer

_BOUNDARY = -1
_MAX_MATCHES = 512


class ReferenceCopy(Drafter):
    def __init__(
        self,
        references: Any = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        include_prompt: bool = True,
        match_length: int = 1,
        copy_length: int = 1000,
        mode: Literal["tree", "llma"] = "tree",
    ):
        if isinstance(references, str):
            references = [references]
        self.include_prompt = include_prompt
        self.match_length = match_length
        self.copy_length = copy_length
        self.mode = mode
        self._text = TokenBuffer()
        for reference in references or []:
            if isinstance(reference, str):
                reference = tokenizer(reference, add_special_tokens=False).input_ids
            self._text.extend(np.asarray(reference))
            self._text.extend(np.array([_BOUNDARY]))
        self._references_end = len(self._text)

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._text.truncate(self._references_end)
        self._context = np.empty(0, np.int32)
        self.observe(prompt_ids)

    def draft(self, budget: int) -> DraftTree:
        return self._grow(budget, chain=False)

    def draft_chain(self, budget: int) -> DraftTree:
        return self._grow(budget, chain=True)

    def observe(self, tokens: np.ndarray) -> None:
        self._text.extend(tokens)
        self._context = np.concatenate((self._context, tokens[-16:])).astype(np.int32)[-16:]

    def end(self) -> None:
        self._text.truncate(self._references_end)

    def _grow(self, budget: int, chain: bool) -> DraftTree:
        if budget == 0:
            return DraftTree.empty()
        tokens = np.empty(budget, np.int64)
        parents = np.empty(budget, np.int32)
        probs = np.empty(budget, np.float32)
        text = self._text
        size = kernels.grow_tree(
            text.tokens, text.previous, text.latest, self._context, self.match_length,
            self.copy_length, chain, tokens, parents, probs,
        )  # fmt: skip
        return DraftTree(tokens[:size], parents[:size], probs[:size])
